"""`loka plan`, `explain`, `diff`, `translate`: make a plan from a probe's report, explain, compare and translate plans.

    loka plan probe.json --accuracy-only --out plan.json
    loka plan probe.json --target "NVIDIA H200" --row-factor 16         speeds from the rows that ship with loka
    loka plan probe.json --target "NVIDIA H200" --db rows.sqlite --weights cached --override 'core.head.*=high'
    loka plan probe.json --accuracy-only --max-metric-change 0.001
    loka plan probe.json --accuracy-only --no-chains --out single.json     for loka translate: other tools have no chains
    loka explain plan.json core.head.last
    loka diff plan.json other.json
    loka translate plan.json torchao

`loka diff` exits 1 if the plans differ, as diff does.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    from loka.dispatch import Database

PlanFile = Annotated[Path, typer.Argument(help="A plan (JSON).")]


def plan(
    probe: Annotated[Path, typer.Argument(help="A probe's report (JSON).")],
    max_error: Annotated[
        float | None, typer.Option(help="Limit of the forward error (MERE); default: the report's.")
    ] = None,
    max_gradient_error: Annotated[
        float | None, typer.Option(help="Limit of the relative L2 error of gradients; default: the report's.")
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(help="Smallest speedup over bf16 worth converting for; default: 1.05.", show_default=False),
    ] = None,
    accuracy_only: Annotated[bool, typer.Option("--accuracy-only", help="Ignore speed; the plan says so.")] = False,
    target: Annotated[
        str | None, typer.Option(help="Device to plan for, from rows of the database, e.g. 'NVIDIA H200'.")
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(help="Database with rows of --target; default: the shipped rows and your own (loka db)."),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="On --target, weights are quantized in every call (dynamic) or once (cached).")
    ] = "dynamic",
    row_factor: Annotated[
        float, typer.Option(help="Rows per call on --target, as a multiple of those in the report.")
    ] = 1.0,
    recipe: Annotated[str, typer.Option(help="auto, or the only recipe to use.")] = "auto",
    max_metric_change: Annotated[
        float | None,
        typer.Option(help="Largest relative change of the end metric (0.001 is 0.1 %); needs measured sensitivity."),
    ] = None,
    chains: Annotated[
        bool | None,
        typer.Option(
            "--chains/--no-chains",
            help="Whether linears pass FP8 to each other; default: only with --accuracy-only.",
            show_default=False,
        ),
    ] = None,
    override: Annotated[list[str] | None, typer.Option(help="WILDCARD=RECIPE, WILDCARD=auto or WILDCARD=high.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the plan to.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Choose, for every GEMM, the fastest candidate that is accurate enough."""
    from loka import records
    from loka.dispatch import Policy
    from loka.probe import Report

    check_file("--out", out, [probe])
    if target is None and (db is not None or weights != "dynamic" or row_factor != 1):
        raise ValueError("--db, --weights and --row-factor choose database rows of a device: name it with --target")
    if accuracy_only and min_speedup is not None:
        raise ValueError(f"--accuracy-only ignores speed, --min-speedup {min_speedup:g} asks for it: choose one")
    report = records.load(probe, records.ProbeReport)
    elsewhere = target is not None and target != report.environment.device
    made = Report(report).plan(
        max_error=max_error,
        max_gradient_error=max_gradient_error,
        min_speedup=None if accuracy_only else Policy.min_speedup if min_speedup is None else min_speedup,
        target=target,
        overrides=parse_overrides(override or []),
        recipe=recipe,
        weights=weights,  # type: ignore[arg-type]  # checked by Policy
        row_factor=row_factor,
        max_metric_change=max_metric_change,
        chains=chains,
        database=_rows(db) if elsewhere or db else None,
    )
    if out is not None:
        records.save(made, out)
    typer.echo(records.to_json(made).decode() if json_ else str(made))


def _rows(db: Path | None) -> "Database":
    """Open the named database; without a name, return the shipped rows merged with the user's own, if any."""
    from loka.dispatch import Database
    from loka.dispatch.database import default_path
    from loka.dispatch.speed import shipped_database

    if db is not None:
        return Database.open(db, create=False)
    rows = shipped_database()
    if default_path().exists():
        with Database.open(create=False) as own:
            rows.merge(own.export())
    return rows


def parse_overrides(texts: list[str]) -> dict[str, str]:
    """Parse `WILDCARD=RECIPE` pairs. The first wildcard that matches a site decides."""
    overrides = {}
    for text in texts:
        pattern, separator, recipe = text.rpartition("=")
        if not separator or not pattern:
            raise ValueError(f"--override {text!r}: expected WILDCARD=RECIPE, e.g. 'core.head.*=high'")
        overrides[pattern] = recipe
    return overrides


def explain(
    file: PlanFile,
    site: Annotated[
        str | None,
        typer.Argument(help="Name of a site, unit, table or collective; default: summarize the whole plan."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what runs there as JSON.")] = False,
) -> None:
    """Summarize a plan, or explain what one site runs and why."""
    import msgspec

    from loka import records

    loaded = records.load(file, records.Plan)
    text = str(loaded) if site is None else loaded.explain(site)
    if json_ and site is None:
        text = records.to_json(loaded).decode()
    elif json_ and site is not None:
        named: dict[str, Any] = {p.name: p for p in (*loaded.parts, *loaded.units)} | {s.site: s for s in loaded.sites}
        text = msgspec.json.encode(
            loaded.unit_of(site) or named[site]
        ).decode()  # a site inside a unit runs as that unit
    typer.echo(text)


def diff(
    before: PlanFile,
    after: PlanFile,
    json_: Annotated[bool, typer.Option("--json", help="Print the differences as a JSON list.")] = False,
) -> None:
    """Show what changed from one plan to another."""
    import json

    from loka import records

    text = records.load(before, records.Plan).diff(records.load(after, records.Plan))
    if json_:
        typer.echo(json.dumps(text.split("\n") if text else []))
    elif text:
        typer.echo(text)
    if text:
        raise typer.Exit(1)


def translate(
    file: PlanFile,
    to: Annotated[str, typer.Argument(help="torchao, transformer-engine, llm-compressor or modelopt.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Translate a plan into another tool's configuration: a filter, a YAML file, an ignore list."""
    from loka import dispatch, records

    check_file("--out", out, [file])
    text = dispatch.export(records.load(file, records.Plan), to)
    if out is None:
        typer.echo(text, nl=False)
    else:
        records.write_atomically(out, text.encode())
