"""`loka mods`: list model rewrites, show what they would do to a model, and suggest some from a probe's report.

    loka mods list
    loka mods apply --model wukong:tiny --data synthetic --mods no_bias,block_norm,hard_swish
    loka mods apply --model mypkg.net:make --data mypkg.net:batches --mods align_shapes --json
    loka mods suggest probe.json

`apply` is a dry run that prints the summary. To train with mods use `loka train --mods ...`; in code `loka.mods.apply`.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loka.cli.places import check_file

app = typer.Typer(no_args_is_help=True, help="Rewrites that make more of a model safe and fast in low precision.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_mods(json_: Json = False) -> None:
    """List the mods, and whether each changes the function that a model computes."""
    from loka import mods

    rows = []
    for name in mods.names():
        mod = mods.find(name)
        module = __import__(type(mod).__module__, fromlist=["__doc__"])
        text = (module.__doc__ or "").partition("\n")[0].removeprefix(f"{name}: ")
        rows.append({"mod": name, "effect": mod.effect, "what": text})
    if json_:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['mod']:22} {row['effect']:13} {row['what']}")


@app.command("apply")
def apply_mods(
    mods: Annotated[str, typer.Option(help="Mods, comma-separated, in order.")] = "no_bias,block_norm,hard_swish",
    model: Annotated[str, typer.Option(help="family:size, or pkg.module:factory.")] = "wukong:tiny",
    data: Annotated[
        str | None, typer.Option(help="Data set, or pkg.module:batches; run once to find the order of modules.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model option, e.g. activation=silu.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="Data set option, e.g. rows=1000.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write the summary to.")] = None,
    json_: Json = False,
) -> None:
    """Show what mods would change in a model, what they would leave unchanged, and why."""
    import sys
    from contextlib import redirect_stdout

    from loka import records
    from loka.mods import apply

    check_file("--out", out)
    subject, example = _load(model, data, set_, data_option, data_root, seed)
    with redirect_stdout(sys.stderr):  # mods run the model, which may be a user's and may print
        applied = apply(subject.model, mods, example=example, model_name=subject.name)
    if out is not None:
        records.save(applied.summary, out)
    typer.echo(records.to_json(applied.summary).decode() if json_ else str(applied))


def _load(model: str, data: Any, set_: Any, data_option: Any, root: Any, seed: int = 0) -> tuple[Any, Any]:
    """Open a model, and capture the arguments it is called with on one batch."""
    from loka import mods
    from loka.cli.subject import load_subject
    from loka.cli.train import parse_options

    options, of_data = parse_options(set_), parse_options(data_option)
    subject = load_subject(model, data, batch_size=8, seed=seed, root=root, model_options=options, data_options=of_data)
    batch = next(subject.stream("train"))
    return subject, mods.capture_example(subject.model, lambda: subject.loss(batch), stop=True)


@app.command("suggest")
def suggest(
    probe: Annotated[Path, typer.Argument(help="A probe's report (JSON).")],
    model: Annotated[
        str | None, typer.Option(help="The probed model, for mods that depend on what feeds a site.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data set, or pkg.module:batches, for --model.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model option, e.g. activation=silu.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="Data set option, e.g. rows=1000.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    json_: Json = False,
) -> None:
    """Suggest mods from a probe's report. Exit 1 if there are suggestions."""
    from dataclasses import asdict

    from loka import mods, records

    record = records.load(probe, records.ProbeReport)
    if model is None:
        found = mods.suggest(record)
        for mod, sites in mods.unjudged(record).items():
            typer.echo(
                f"not judged: {mod} for {', '.join(sites)}; what feeds them decides: pass --model and --data", err=True
            )
    else:
        subject, example = _load(model, data, set_, data_option, data_root)
        names = dict(subject.model.named_modules())
        if not any(site.name in names for site in record.sites):
            first = ", ".join(site.name for site in record.sites[:4])
            raise ValueError(f"--model {model} has none of the sites of {probe} ({first}); expected the probed model")
        found = mods.suggest(record, subject.model, example=example)
    if json_:
        typer.echo(json.dumps([asdict(suggestion) for suggestion in found]))
    else:
        typer.echo("\n".join(map(str, found)) or "nothing to propose")
    if found:
        raise typer.Exit(1)
