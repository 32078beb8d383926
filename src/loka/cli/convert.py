"""`loka convert`: put a model into low precision by a plan or a recipe, say what that did, and keep the result.

    loka convert wukong:tiny --recipe rowwise
    loka convert wukong:tiny --plan plan.json --weights runs/x/checkpoints/step-00000020 --out converted
    loka convert mymodel:build --data mymodel:batches --recipe tensorwise --scales delayed --keep 'head*'

--out gets three files: model.safetensors, a plain state_dict with the names and values the model had; scales.safetensors, what remembered scales need (absent where all scales are
dynamic); conversion.json, what was converted, what was kept and why. The loss of one batch before and after is shown beside the summary: a look, not a verdict.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["convert"]


def convert(
    model: Annotated[str, typer.Argument(help="wukong:small, or pkg.module:factory.")],
    plan: Annotated[Path | None, typer.Option(help="A plan (JSON), from `loka plan`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="One recipe at every linear: tensorwise, rowwise, ...")] = None,
    data: Annotated[str | None, typer.Option(help="A data set, or pkg.module:batches.")] = None,
    loss: Annotated[str | None, typer.Option(help="pkg.module:fn(output, targets).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint folder, or a .safetensors state_dict.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Wildcard over names to leave alone (with --recipe).")] = None,
    backend: Annotated[str, typer.Option(help="Backend of the GEMMs (with --recipe).")] = "auto",
    scales: Annotated[str, typer.Option(help="dynamic, delayed or static (with --recipe).")] = "dynamic",
    gradients: Annotated[str | None, typer.Option(help="Format of gradients: e4m3 or e5m2 (with --recipe).")] = None,
    save: Annotated[str, typer.Option(help="What backward keeps of activations: auto, fp8 or high.")] = "auto",
    steps: Annotated[int, typer.Option(help="Batches that set delayed or static scales.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Examples in a batch.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for the converted model.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Convert a model to low precision, by a plan or by a recipe."""
    from loka import records
    from loka.cli.subject import load_subject
    from loka.convert import LinearOptions
    from loka.convert import convert as convert_model

    if steps < 1:
        raise ValueError(f"--steps {steps}: expected at least 1")
    if keep and plan is not None:
        raise ValueError("--keep belongs to --recipe: a plan already says which modules")
    options = LinearOptions(scales=scales, gradients=gradients, save=save)  # type: ignore[arg-type]
    subject = load_subject(model, data, batch_size=batch_size, seed=seed, loss=loss, device=device)
    if weights is not None:
        _load(subject.model, weights)
    batch = next(iter(subject.batches("train")))
    subject.model.train()
    before, names = _lose(subject, batch), list(subject.model.state_dict())
    summary = convert_model(
        subject.model,
        None if plan is None else records.load(plan, records.Plan),
        recipe=recipe,
        module_filter_fn=None if not keep else _leaving(keep),
        backend=backend,
        options=options,
        example=lambda: subject.loss(batch),
    )
    if list(subject.model.state_dict()) != names:
        raise RuntimeError("the conversion changed the names of the state_dict")
    if scales != "dynamic":
        _remember(subject, scales, steps)
    found = {
        "model": model,
        "converted": summary.converted,
        "kept": summary.kept,
        "low_precision_share": summary.low_precision_share,
        "loss_before": before,
        "loss_after": _lose(subject, batch),
    }
    if out is not None:
        _write(subject.model, out, found)
    _show(summary, found, json_)


def _leaving(patterns: list[str]) -> Any:
    from fnmatch import fnmatchcase

    return lambda _, name: not any(fnmatchcase(name, pattern) for pattern in patterns)


def _load(model: Any, path: Path) -> None:
    from safetensors.torch import load_file

    from loka.training.snapshot import load_weights

    if path.is_dir():
        load_weights(model, path)
        return
    try:
        model.load_state_dict(load_file(path))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--weights {path}: {error}") from error


def _lose(subject: Any, batch: Any) -> float:
    """The loss of one batch."""
    import torch

    with torch.no_grad():
        return float(subject.loss(batch))


def _remember(subject: Any, scales: str, steps: int) -> None:
    """Run batches so that scales have something to remember; weights stay as they are."""
    from contextlib import nullcontext
    from itertools import islice

    from loka.convert import calibrating, refresh

    with calibrating(subject.model) if scales == "static" else nullcontext():
        for batch in islice(subject.stream("train"), steps):
            subject.loss(batch).backward()
            refresh(subject.model)
    for parameter in subject.model.parameters():
        parameter.grad = None


def _write(model: Any, out: Path, found: dict[str, Any]) -> None:
    import json

    from safetensors.torch import save_file

    from loka.convert import scale_state

    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors")
    if state := scale_state(model):
        save_file({name: t.detach().cpu().contiguous() for name, t in state.items()}, out / "scales.safetensors")
    (out / "conversion.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _show(summary: Any, found: dict[str, Any], as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, what in summary.converted.items():
        typer.echo(f"{name}  {what}")
    typer.echo(str(summary))
    typer.echo(f"loss of one batch: {found['loss_before']:.6f} -> {found['loss_after']:.6f}")
