"""`loka db`: show, merge, export and prune the database of measured kernel speeds, or fill it on this machine's GPU.

    loka db merge rows.json benchmarks/results/h200/scaled_mm.json     exports, benchmark records, other databases
    loka db show --op linear --backend triton
    loka db show --shipped --json                                      the rows that ship with loka
    loka db tune probe.json --seconds 120                              measure what a plan for this machine needs
    loka db export --device "NVIDIA H200" --out rows.json
    loka db prune --before 2026-01-01

The file is --db, else $LOKA_DB, else loka/performance.sqlite in the user's cache folder. `tune` exits 1 if rows were
missing and it could measure none of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    from loka.dispatch import Database
    from loka.records.performance import Origin, PerformanceRow

app = typer.Typer(name="db", help="The performance database: show, merge, export, prune, tune.", no_args_is_help=True)

DbOption = Annotated[Path | None, typer.Option("--db", help="The database; default: $LOKA_DB, else the user's cache.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Op = Annotated[str | None, typer.Option("--op", help="Only rows of this op.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Only rows of this backend.")]
Device = Annotated[str | None, typer.Option("--device", help="Only rows measured on this device.")]


def _filters(**given: str | None) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


@app.command()
def show(
    db: DbOption = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Show the rows that ship with loka instead.")] = False,
    op: Op = None,
    backend: Backend = None,
    device: Device = None,
    limit: Annotated[int, typer.Option(help="Largest number of rows; 0: all.")] = 50,
    json_: JsonOption = False,
) -> None:
    """Print rows, newest first, and the machines they were measured on."""
    import json

    import msgspec

    from loka.dispatch import Database
    from loka.dispatch.speed import shipped_database

    if limit < 0:
        raise ValueError(f"--limit {limit}: expected a number of rows, or 0 for all")
    if shipped and db is not None:
        raise ValueError("--shipped shows the rows that ship with loka, --db those of a file: choose one")
    database = shipped_database() if shipped else Database.open(db, create=False)
    found = list(database.entries(**_filters(op=op, backend=backend, device=device)))
    shown = found[:limit] if limit else found
    if json_:
        typer.echo(json.dumps([{**msgspec.to_builtins(row), "origin": msgspec.to_builtins(o)} for o, row in shown]))
        return
    for origin, row in shown:
        typer.echo(_line(origin, row))
    typer.echo(f"{len(shown)} of {len(found)} matching rows; the database has {len(database)}")
    if not found:
        typer.echo(_why_none(database, {"--op": op, "--backend": backend, "--device": device}), err=True)
    for machine in database.machines():
        typer.echo(f"machine: {machine}")


def _why_none(database: "Database", filters: dict[str, str | None]) -> str:
    """Say where rows are to be had if there are none, or which values the rows have that a filter did not match."""
    rows = list(database.entries())
    if not rows:
        return "hint: loka db show --shipped has rows of an H200; loka db tune measures rows on this machine's GPU"
    seen = {
        "--op": {row.op for _, row in rows},
        "--backend": {row.backend for _, row in rows},
        "--device": {origin.device for origin, _ in rows},
    }
    wrong = [option for option, value in filters.items() if value is not None and value not in seen[option]]
    if not wrong:
        return "hint: there are rows for each of these filters, but not for all of them together"
    return "\n".join(f"{option} {filters[option]}: the rows have {', '.join(sorted(seen[option]))}" for option in wrong)


def _line(origin: "Origin", row: "PerformanceRow") -> str:
    shape = "x".join(str(size) for size in (row.m, row.k, row.n) if size)
    head = f"{row.op:<13} {shape:<18} {row.variant:<58} {row.backend:<9}"
    if row.microseconds is None:
        return f"{head} refused: {row.refusal}"
    speedup = f" {row.speedup:.2fx}" if row.speedup else ""
    return f"{head} {row.microseconds.value:9.2f} us{speedup}  {origin.device}, {row.version}"


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Exports (JSON), kernel benchmarks (JSON), databases (SQLite).")],
    db: DbOption = None,
    json_: JsonOption = False,
) -> None:
    """Add rows from other files. Where both have a row, the newer one is kept."""
    import json

    from loka.dispatch import Database

    answers = []
    with Database.open(db) as database:
        for file in files:
            written, skipped = _merge(database, file)
            answers.append({"file": str(file), "written": written, "skipped": skipped})
        total = len(database)
    if json_:
        typer.echo(json.dumps({"files": answers, "rows": total}))
        return
    for answer in answers:
        typer.echo(f"{answer['file']}: {answer['written']} rows written")
        for reason, count in dict(answer["skipped"]).items():  # type: ignore[call-overload]
            typer.echo(f"  {count} skipped: {reason}")
    typer.echo(f"{total} rows in all")


def _merge(database: "Database", file: Path) -> tuple[int, dict[str, int]]:
    """Merge one file; return the number of rows written, and of rows skipped by reason."""
    import msgspec

    from loka.dispatch import Database
    from loka.dispatch.rows import rows_of_bench
    from loka.records import RecordError, from_json
    from loka.records.performance import KernelBench, PerformanceRows

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    if data.startswith(b"SQLite format 3"):
        with Database.open(file, create=False) as other:
            return database.merge(other.export()), {}
    try:
        kind = msgspec.json.decode(data).get("kind")
    except (msgspec.DecodeError, AttributeError) as error:
        raise RecordError(f"{file}: neither a database nor a JSON record: {error}") from error
    if kind == "performance":
        return database.merge(from_json(data, PerformanceRows, source=str(file))), {}
    if kind == "kernel_bench":
        imported = rows_of_bench(from_json(data, KernelBench, source=str(file)))
        return database.add(imported.origin, imported.rows), imported.skipped
    raise RecordError(f"{file}: a record of kind {kind!r}; expected performance or kernel_bench")


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="File to write.")],
    db: DbOption = None,
    op: Op = None,
    backend: Backend = None,
    device: Device = None,
) -> None:
    """Write rows to a JSON file that `loka db merge` reads."""
    from loka.dispatch import Database
    from loka.dispatch.database import default_path
    from loka.records import to_json, write_atomically

    check_file("--out", out, [db or default_path()])
    with Database.open(db, create=False) as database:
        record = database.export(**_filters(op=op, backend=backend, device=device))
    write_atomically(out, to_json(record) + b"\n")
    typer.echo(f"{sum(len(group.rows) for group in record.groups)} rows of {len(record.groups)} runs written to {out}")


@app.command()
def prune(
    db: DbOption = None,
    before: Annotated[str | None, typer.Option(help="Delete rows measured before this day, e.g. 2026-01-31.")] = None,
    others: Annotated[bool, typer.Option("--others", help="Delete rows this machine cannot use.")] = False,
    json_: JsonOption = False,
) -> None:
    """Delete old rows, or rows of other machines and versions."""
    import json

    from loka.dispatch import Database
    from loka.dispatch.rows import machine_here

    if before is None and not others:
        raise ValueError("nothing to delete: give --before DAY, or --others")
    with Database.open(db, create=False) as database:
        deleted = database.prune(before=before, except_machines=[machine_here()] if others else [])
        left = len(database)
    typer.echo(json.dumps({"deleted": deleted, "left": left}) if json_ else f"{deleted} rows deleted, {left} left")


@app.command()
def tune(
    probe: Annotated[Path, typer.Argument(help="A probe's report (JSON), whose sites are measured.")],
    db: DbOption = None,
    seconds: Annotated[float, typer.Option(help="Time limit.")] = 120.0,
    weights: Annotated[str, typer.Option(help="dynamic, or cached for inference.")] = "dynamic",
    backends: Annotated[str, typer.Option(help="Comma-separated; default: all but the reference.")] = "",
    device: Annotated[str, typer.Option(help="cuda; cpu only reports that a GPU is needed.")] = "cuda",
    json_: JsonOption = False,
) -> None:
    """Measure the rows that a plan for this machine needs and the database does not have."""
    import json
    from dataclasses import asdict

    from loka import dispatch, records
    from loka.cli.subject import find_device

    if not seconds > 0:
        raise ValueError(f"--seconds {seconds:g}: expected a time above 0")
    where = find_device(device)
    report = records.load(probe, records.ProbeReport)
    names = [name.strip() for name in backends.split(",") if name.strip()] or None
    jobs = dispatch.jobs_of_report(report, weights=weights, backends=names)  # type: ignore[arg-type]
    with dispatch.Database.open(db) as database:
        result = dispatch.tune(jobs, database, where, seconds=seconds)
    typer.echo(json.dumps(asdict(result)) if json_ else str(result))
    if not result.measured and result.unmeasured:
        raise typer.Exit(1)
