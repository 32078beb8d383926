"""`loka export`: export a frozen model to one file that runs without loka.

    loka export wukong:tiny --recipe rowwise --out ranker.pt2        an AOTInductor package
    loka export wukong:tiny --plan plan.json --weights runs/x/checkpoints/step-00000020 --out planned.pt2
    loka export runs/ranker --out ranker.onnx                        ONNX with Q/DQ nodes, from a ranker's folder
    loka export mine.model:build --data mine.data:batches --recipe rowwise --format onnx --out mine.onnx

The model is converted by the plan or the recipe, frozen, traced and packaged; the package is loaded again and compared
with the model on one batch, and is written only if they agree. Kernels implemented in Python cannot be packaged: others
are chosen, or the export fails and names what needs them. To write a plan for another library, use `loka translate`.
stdout says what was written (with `--json` as JSON). Exit 2 if the model cannot be exported; the message says why.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from loka.cli.places import check_file


def export(
    model: Annotated[str, typer.Argument(help="wukong:small, pkg.module:factory, or the folder of a ranker.")],
    out: Annotated[Path, typer.Option(help="File to write: *.pt2 or *.onnx.")],
    format: Annotated[str | None, typer.Option(help="aoti or onnx; default: by the suffix of --out.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan (JSON) to convert by.")] = None,
    recipe: Annotated[str | None, typer.Option(help="One recipe for every linear instead: rowwise, ...")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint folder, or a .safetensors state_dict.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set, or pkg.module:batches, for the example batch.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of the example batch.")] = 256,
    fixed: Annotated[bool, typer.Option("--fixed", help="Fix the number of rows to --batch-size.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest accepted relative L2 difference from the model. "
            "Default: 0.01, or how far its own results move if its inputs are rounded differently."
        ),
    ] = None,
    factory: Annotated[
        str | None, typer.Option(help="pkg.module:function that builds the ranker, if its folder names one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    device: Annotated[str, typer.Option(help="Device the file will run on: cpu or cuda.")] = "cpu",
    json_: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Export a frozen model to one file that runs without loka."""
    from loka.cli.convert import say_if_untrained
    from loka.exporting import export as run

    check_file("--out", out)
    if batch_size < 1:
        raise ValueError(f"--batch-size {batch_size}: expected at least 1 row")
    if model.endswith(".json"):
        raise ValueError(
            f"{model} is a file, expected a model; hint: a plan for another library is written by loka translate "
            f"{model} torchao"
        )
    if Path(model).is_dir():
        if given := [
            name
            for name, value in {"plan": plan, "recipe": recipe, "weights": weights, "data": data}.items()
            if value is not None
        ]:
            raise ValueError(f"{model} is a ranker's folder, which has its own {given[0]}: leave out --{given[0]}")
        network, example = _open_folder(Path(model), factory, batch_size, device)
    elif factory is not None:
        raise ValueError(f"--factory {factory} is for a ranker's folder; {model} is built by its name")
    else:
        network, example = _open_model(model, data, plan, recipe, weights, batch_size, seed, device)
        say_if_untrained(model, weights)
    made = run(network, example, out, format=format, dynamic=not fixed, tolerance=tolerance)  # type: ignore[arg-type]
    if json_:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps({**asdict(made), "path": str(made.path), "bytes": made.path.stat().st_size}))
    else:
        typer.echo(str(made))


def _open_folder(folder: Path, factory: str | None, rows: int, device: str) -> tuple[Any, Any]:
    """Open a ranker's folder as `loka serve` does; return the model and a batch of random rows."""
    from loka.serving.rank_bundle import draw_batch, load_ranker

    bundle = load_ranker(folder, factory=factory, device=device)
    return bundle.model, draw_batch(bundle.schema, rows, device)


def _open_model(
    model: str,
    data: str | None,
    plan: Path | None,
    recipe: str | None,
    weights: Path | None,
    rows: int,
    seed: int,
    device: str,
) -> tuple[Any, Any]:
    """Build a model, convert and freeze it; return it with the arguments it is called with on one batch."""
    from loka import placing, records
    from loka.cli.convert import load_weights_from
    from loka.cli.subject import load_subject
    from loka.units import capture_example

    if plan is not None and recipe is not None:
        raise ValueError("give --plan or --recipe, not both")
    subject = load_subject(model, data, batch_size=rows, seed=seed, device=device)
    if weights is not None:
        load_weights_from(subject.model, weights)
    batch = next(subject.stream("valid" if subject.held_out else "train"))
    subject.model.eval()
    example = capture_example(subject.model, lambda: subject.values(batch), stop=True)
    if plan is not None:
        placing.convert(subject.model, records.load(plan, records.Plan), freeze=True, example=example)
    elif recipe is not None:
        placing.convert(subject.model, recipe=recipe, freeze=True)
    return subject.model.eval().requires_grad_(False), example
