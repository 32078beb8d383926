"""`loka data`: list the data sets, prepare one, show what a cache holds.

    loka data list
    loka data get ml-1m                        # download from the publisher, then preprocess
    loka data get criteo --source ~/criteo     # preprocess local files
    loka data get complete-journey --kind ranking --set size=full
    loka data info ml-1m --verify

Exit 1 if `info` finds a damaged cache or none; 2 if the request is invalid.
"""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loka.data.cache import Manifest

app = typer.Typer(help="Data sets: list, get, info.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Data set, see `loka data list`.")]
Root = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of raw data and caches; default: $LOKA_DATA, else $XDG_CACHE_HOME/loka, else ~/.cache/loka.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(root: Root = None, json_: Json = False) -> None:
    """List the built-in data sets, and which are cached."""
    from loka.data import CATALOG
    from loka.data.faults import DataError
    from loka.data.loader import list_caches

    rows: list[dict[str, Any]] = []
    for entry in CATALOG.values():
        caches = list_caches(entry.name, root=root)
        ready = sum(not isinstance(found, DataError) for found in caches.values())
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "kinds": list(entry.kinds),
                "terms": entry.terms,
                "publisher": entry.publisher,
                "download": bool(entry.remotes),
                "caches": ready,
                "damaged": len(caches) - ready,
            }
        )
    if json_:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = f"{row['caches']} cached" if row["caches"] else "not cached"
        damaged = f", {row['damaged']} damaged or unfinished" if row["damaged"] else ""
        typer.echo(f"{row['name']:<24}{'+'.join(row['kinds']):<20}{state}{damaged}")
        typer.echo(f"{'':<24}{row['title']} ({row['terms']})")


@app.command()
def get(
    name: Name,
    source: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Use these raw files instead of downloading.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="ranking or sequences; default: every kind the data set has.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Option of the data set; if it has two kinds, also give --kind."
        ),
    ] = None,
    max_bad: Annotated[float | None, typer.Option(help="Largest accepted share of bad rows.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Replace an existing cache.")] = False,
    root: Root = None,
    json_: Json = False,
) -> None:
    """Download (where the publisher offers the file) and preprocess a data set."""
    from loka.cli.train import parse_options
    from loka.data.catalog import find_entry
    from loka.data.faults import MAX_BAD
    from loka.data.loader import fetch_raw, is_cached, load, load_sequences

    entry = find_entry(name, kind)
    options = parse_options(set_)
    kinds = (kind,) if kind else entry.kinds
    if options and len(kinds) > 1:
        raise ValueError(f"--set needs --kind: {name} has {' and '.join(kinds)}, whose options differ")
    limit = MAX_BAD if max_bad is None else max_bad
    results: list[dict[str, Any]] = []
    with _progress() as progress:
        missing = rebuild or not all(is_cached(name, each, root=root, **options) for each in kinds)
        if source is None and entry.remotes and missing:
            fetch_raw(name, root=root, progress=progress)
        for each in kinds:
            arguments: dict[str, Any] = {"root": root, "source": source, "rebuild": rebuild, "max_bad": limit}
            if each == "ranking":
                data = load(name, **arguments, progress=progress, **options)
                sizes = {split.name: len(split) for split in (data.train, data.valid, data.test)}
                results.append({"kind": each, "examples": sizes, **data.info})
            else:
                found = load_sequences(name, **arguments, progress=progress, **options)
                results.append({"kind": each, "users": found.n_users, "items": found.n_items, **found.info})
    if json_:
        typer.echo(json.dumps({"name": name, "caches": results}, indent=2))
        return
    for result in results:
        counts = result.get("examples") or {"users": result["users"], "items": result["items"]}
        described = ", ".join(f"{key} {value:,}" for key, value in counts.items())
        bad = f", {result['bad_rows']} bad rows dropped" if result.get("bad_rows") else ""
        typer.echo(f"{name} {result['kind']}: {described}{bad}")
        typer.echo(f"  {result.get('folder', 'generated while it is read, no cache')}")


@app.command()
def info(
    name: Name,
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksum of every file.")] = False,
    root: Root = None,
    json_: Json = False,
) -> None:
    """Show what the caches of a data set hold: schema, counts, origin, bad rows, damage."""
    from loka.data.catalog import find_entry
    from loka.data.faults import DataError
    from loka.data.loader import list_caches

    entry = find_entry(name)
    caches = list_caches(name, root=root, verify=verify)
    damaged = {folder: found for folder, found in caches.items() if isinstance(found, DataError)}
    good = {folder: found for folder, found in caches.items() if not isinstance(found, DataError)}
    if json_:
        document = {
            "name": name,
            "publisher": entry.publisher,
            "terms": entry.terms,
            "caches": [{"folder": str(folder), **_describe(manifest)} for folder, manifest in good.items()],
            "damaged": [{"folder": str(folder), "error": str(error)} for folder, error in damaged.items()],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(f"{entry.title}\nterms: {entry.terms}\npublisher: {entry.publisher}")
        for folder, manifest in good.items():
            _print_cache(folder, manifest)
        for error in damaged.values():
            typer.echo(f"\n{error}")
        if not caches:
            typer.echo("generated while it is read" if entry.generated else f"not cached yet; loka data get {name}")
    if damaged or not (caches or entry.generated):
        raise typer.Exit(1)


def _describe(manifest: "Manifest") -> dict[str, Any]:
    from dataclasses import asdict

    document = asdict(manifest)
    size = sum(column["rows"] * _item_bytes(column["dtype"]) for column in document.pop("columns").values())
    document["bytes"] = size + sum(asset["rows"] for asset in document.pop("assets").values())
    return document


def _print_cache(folder: Path, manifest: "Manifest") -> None:
    typer.echo(f"\n{manifest.kind} cache, {_describe(manifest)['bytes'] / 1e6:.1f} MB: {folder}")
    typer.echo(f"  options: {manifest.options}")
    if manifest.rows:
        typer.echo("  examples: " + ", ".join(f"{split} {rows:,}" for split, rows in manifest.rows.items()))
    if manifest.schema is not None:
        schema = manifest.schema
        typer.echo(f"  labels: {', '.join(schema.labels)}")
        typer.echo(f"  dense ({len(schema.dense)}): {', '.join(schema.dense)}")
        fields = ", ".join(f"{field.name} {field.cardinality:,}" for field in schema.categorical)
        typer.echo(f"  categorical ({len(schema.categorical)}): {fields}")
        for sequence in schema.sequences:
            shared = f", shares {sequence.shares}" if sequence.shares else ""
            typer.echo(f"  sequence {sequence.name}: up to {sequence.max_length} of {sequence.cardinality:,}{shared}")
    for key, value in manifest.facts.items():
        typer.echo(f"  {key}: {value}")
    typer.echo(f"  bad rows: {manifest.bad_rows} of {manifest.total_rows:,}")
    for example in manifest.bad_examples:
        typer.echo(f"    {example}")
    for file in manifest.source:
        typer.echo(f"  from {file.name}: {file.bytes:,} bytes, sha256 {file.sha256}")


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "bytes" else int(dtype[2:])


@contextmanager
def _progress() -> "Iterator[Callable[[str, int, int | None], None]]":
    """Show a progress bar on stderr, labelled with the current stage."""
    from loka.data.progress import make_bar

    with make_bar(transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(stage: str, done: int, total: int | None) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield show
