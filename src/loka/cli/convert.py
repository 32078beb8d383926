"""`loka convert`: convert a model to low precision by a plan or a recipe, report the changes, and save the result.

    loka convert wukong:tiny --recipe rowwise
    loka convert wukong:tiny --plan plan.json --weights runs/x/checkpoints/step-00000020 --out converted
    loka convert mymodel:build --data mymodel:batches --recipe tensorwise --scales delayed --keep 'head*'

--out receives three files: model.safetensors, a plain state_dict with the original names and values;
scales.safetensors, the state of delayed or static scales (absent if all scales are dynamic); conversion.json, the
record of what was converted, what was kept and why. The record notes the loss of one batch before and after, as a quick
check only.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from loka.cli.places import check_folder

STEPS = 4
REPORT = "conversion.json"


def convert(
    model: Annotated[str, typer.Argument(help="wukong:small, or pkg.module:factory.")],
    plan: Annotated[Path | None, typer.Option(help="A plan (JSON), from `loka plan`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="One recipe for every linear: tensorwise, rowwise, ...")] = None,
    data: Annotated[str | None, typer.Option(help="Data set, or pkg.module:batches.")] = None,
    loss: Annotated[str | None, typer.Option(help="pkg.module:fn(output, targets).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint folder, or a .safetensors state_dict.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Wildcard of linears not to convert (with --recipe).")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the GEMMs; default: auto with --recipe, the plan's with --plan.")
    ] = None,
    scales: Annotated[str, typer.Option(help="dynamic, delayed or static (with --recipe).")] = "dynamic",
    gradients: Annotated[str | None, typer.Option(help="Format of gradients: e4m3 or e5m2 (with --recipe).")] = None,
    save: Annotated[str, typer.Option(help="Precision of activations saved for backward: auto, fp8 or high.")] = "auto",
    steps: Annotated[
        int | None, typer.Option(help=f"Batches that set delayed or static scales; default: {STEPS}.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for the converted model.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Convert a model to low precision by a plan or a recipe."""
    import msgspec

    from loka import records
    from loka.cli.subject import load_subject
    from loka.placing import LinearOptions
    from loka.placing import convert as convert_model

    _check_request(plan, keep, scales, steps)
    check_folder(
        "--out", out, [weights, weights and weights.parent]
    )  # a file of a folder, or the folder of a checkpoint
    options = LinearOptions(scales=scales, gradients=gradients, save=save)  # type: ignore[arg-type]
    subject = load_subject(model, data, batch_size=batch_size, seed=seed, loss=loss, device=device)
    if weights is not None:
        load_weights_from(subject.model, weights)
    batch = next(subject.stream("train"))
    subject.model.train()
    before, names = _lose(subject, batch), list(subject.model.state_dict())
    summary = convert_model(
        subject.model,
        None if plan is None else records.load(plan, records.Plan),
        recipe=recipe,
        module_filter_fn=None if not keep else _leaving(subject.model, keep),
        backend=backend,
        options=options,
        example=lambda: subject.loss(batch),
    )
    if list(subject.model.state_dict()) != names:
        raise RuntimeError("the conversion changed the names of the state_dict")
    if scales != "dynamic":
        _remember(subject, scales, steps or STEPS)
    note = f"loss of one batch: {before:.6f} -> {_lose(subject, batch):.6f}"
    summary = msgspec.structs.replace(summary, notes=[*summary.notes, note])
    if out is not None:
        say_if_untrained(model, weights)
        _write(subject.model, out, summary)
    if json_:
        typer.echo(records.to_json(summary).decode())
        return
    for name, what in summary.converted.items():
        typer.echo(f"{name}  {what}")
    typer.echo(str(summary))


def _check_request(plan: Path | None, keep: list[str] | None, scales: str, steps: int | None) -> None:
    """Reject contradictory options before anything is loaded."""
    if steps is not None and steps < 1:
        raise ValueError(f"--steps {steps}: expected at least 1")
    if steps is not None and scales == "dynamic":
        raise ValueError(
            "--steps is for delayed or static scales; dynamic ones need no batch: give --scales, or leave out --steps"
        )
    if keep and plan is not None:
        raise ValueError("--keep goes with --recipe: a plan already says which modules to convert")


def _leaving(model: Any, patterns: list[str]) -> Any:
    """Return a filter that rejects linears whose name matches a pattern. A pattern without a match is an error."""
    from fnmatch import fnmatchcase

    from loka.placing.linears import candidates
    from loka.records.prose import name_some

    names = [name for name, _ in candidates(model)]
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ValueError(f"--keep matches no linear: {', '.join(idle)}; linears are {name_some(names, 20)}")  # fmt: skip
    return lambda _, name: not any(fnmatchcase(name, pattern) for pattern in patterns)


def load_weights_from(model: Any, path: Path, option: str = "--weights") -> None:
    """Load the weights of a checkpoint folder or of a .safetensors file. `option` names the path in error messages."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from loka.training.snapshot import load_weights

    try:
        if path.is_dir():
            load_weights(model, path)
        else:
            model.load_state_dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(
            f"{option} {path}: not a safetensors file, or a damaged one ({error}); expected a .safetensors file "
            "or the folder of a checkpoint"
        ) from error
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{option} {path}: {error}") from error


def _lose(subject: Any, batch: Any) -> float:
    import torch

    with torch.no_grad():
        return float(subject.loss(batch))


def _remember(subject: Any, scales: str, steps: int) -> None:
    """Run batches forward and backward to set delayed or static scales. The weights do not change."""
    from contextlib import nullcontext
    from itertools import islice

    from loka.placing import calibrating, refresh

    with calibrating(subject.model) if scales == "static" else nullcontext():
        for batch in islice(subject.stream("train"), steps):
            subject.loss(batch).backward()
            refresh(subject.model)
    for parameter in subject.model.parameters():
        parameter.grad = None


def say_if_untrained(model: str, weights: Path | None, hint: str = "--weights FOLDER") -> None:
    """Tell on stderr that a built-in model without loaded weights has not been trained."""
    from loka.cli.subject import split_name

    if weights is None and split_name(model)[0] is not None:
        typer.echo(f"note: {model} has its initial weights and is not trained; hint: {hint}", err=True)


def _write(model: Any, out: Path, summary: Any) -> None:
    from safetensors.torch import save_file

    from loka import records
    from loka.placing import scale_state

    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
    with records.replacing(out / "model.safetensors") as written:
        save_file(tensors, written)
    (out / "scales.safetensors").unlink(missing_ok=True)  # of an earlier conversion, which may have had other scales
    if state := scale_state(model):
        with records.replacing(out / "scales.safetensors") as written:
            save_file({name: t.detach().cpu().contiguous() for name, t in state.items()}, written)
    records.save(summary, out / REPORT)
