"""`loka quantize`: post-training FP8 quantization of a trained model.

    loka quantize runs/onerec --out runs/onerec-fp8                              from loka train --model onerec
    loka quantize runs/onerec --out runs/onerec-fp8 --bound 0.002 --users 400    within a bound on the likelihood
    loka quantize pkg.module:factory --weights model.safetensors --recipe rowwise --out q.safetensors
    loka quantize wukong:tiny --recipe rowwise --out q.safetensors --data complete-journey --bound 0.001

A recommender's folder becomes a folder, any other model one safetensors file. With --bound, every site is measured
alone on the validation split (negative log-likelihood of held-out items, or the loss of the data set), then all
together; the most harmful sites stay in 16-bit until the upper end of the interval is within the bound. Recipes:
tensorwise, rowwise, blockwise, onerec, onerec_rows and onerec_mixed (`loka.dispatch.recipe`). Exit 1 if the bound can
only be met by quantizing nothing; 2 if the request is invalid.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file, check_folder

if TYPE_CHECKING:
    from torch import nn

    from loka.ptq import Summary


def quantize(
    model: Annotated[str, typer.Argument(help="Folder of a recommender, family:size, or pkg.module:factory.")],
    out: Annotated[Path, typer.Option(help="Folder or .safetensors file to write.")],
    recipe: Annotated[
        str, typer.Option(help="tensorwise, rowwise, blockwise, ...; auto: onerec for a OneRec, else rowwise.")
    ] = "auto",
    plan: Annotated[Path | None, typer.Option(help="A plan instead of a recipe (loka plan, loka tune).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Safetensors file with the model's weights.")] = None,
    bound: Annotated[float | None, typer.Option(help="Largest relative change of the loss, e.g. 0.002.")] = None,
    widen: Annotated[
        bool, typer.Option("--widen", help="Also quantize sites that the recipe keeps, where measured safe.")
    ] = False,
    keep: Annotated[list[str] | None, typer.Option(help="Pattern of names to keep in 16-bit.")] = None,
    users: Annotated[int, typer.Option(help="Users or examples to measure on, with --bound or --widen.")] = 400,
    data: Annotated[str | None, typer.Option(help="Data to measure on; default: the model's.")] = None,
    loss: Annotated[str | None, typer.Option(help="pkg.module:fn(output, targets), for your own model.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write the compressed-tensors layout here.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of an untrained model.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Quantize a trained model to FP8, optionally within a bound on its loss."""
    from loka import records
    from loka.inference import is_bundle
    from loka.ptq import export_compressed_tensors

    measured = bound is not None or widen
    if plan is not None and recipe != "auto":
        raise ValueError(f"--plan {plan} --recipe {recipe}: give one of them")
    check_folder("--export", export)
    chosen = recipe if plan is None else records.Plan.load(plan)
    options: dict[str, Any] = {"recipe": chosen, "bound": bound, "widen": widen, "keep": tuple(keep or ())}
    if is_bundle(model):
        check_folder("--out", out, [model])
        if weights is not None or loss is not None or seed:
            raise ValueError(f"--weights, --loss and --seed: {model} has its own weights, and is judged by its likelihood; leave them out")  # fmt: skip
        split = (data, data_root, source)
        network, summary = quantize_bundle(Path(model), out, options, users if measured else None, split)
    elif Path(model).exists():
        raise ValueError(
            f"{model} is no recommender (no bundle.json); hint: give a weights file as --weights, with a factory"
        )
    else:
        opening = {"data": data, "seed": seed, "loss": loss, "root": data_root, "source": source}
        network, summary = quantize_network(model, out, options, users if measured else None, weights, opening)
    if export is not None:
        export_compressed_tensors(network, summary, export)
    typer.echo(records.to_json(summary.record).decode() if json_ else str(summary))
    typer.echo(f"written to {out}", err=True)
    if measured and not summary.quantized:
        raise typer.Exit(1)


def quantize_bundle(
    folder: Path, out: Path, options: dict[str, Any], users: int | None, split: tuple[str | None, Path | None, Path | None]
) -> tuple[nn.Module, Summary]:  # fmt: skip
    """Quantize a recommender's folder, measured by the likelihood of validation items of so many users, if given."""
    from dataclasses import replace

    from loka.inference import load_bundle, save_bundle
    from loka.inference.evaluation import make_likelihood_score
    from loka.ptq import quantize as quantize_model

    bundle = load_bundle(folder)
    extra: dict[str, Any] = {}
    if users is not None:
        data, root, source = split
        score = make_likelihood_score(bundle, bundle.open_data(data, root=root, source=source).valid, users)
        extra = {"score": score, "metric": "negative log-likelihood", "progress": tell}
    summary = quantize_model(bundle.model, **options, **extra)
    save_bundle(replace(bundle, summary=summary), out)
    return bundle.model, summary


def quantize_network(
    model: str, out: Path, options: dict[str, Any], examples: int | None, weights: Path | None, opening: dict[str, Any]
) -> tuple[nn.Module, Summary]:
    """Quantize a built-in or a user's own model, measured by the loss on so many examples of its data, if given."""
    import torch

    from loka.cli.convert import load_weights_from
    from loka.cli.own_code import build_own
    from loka.cli.subject import load_subject, split_name
    from loka.ptq import quantize as quantize_model
    from loka.ptq import save

    split_name(model)  # report a missing folder or unknown model before complaining about --out
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out}: this model is written as one file, give a name that ends in .safetensors")
    check_file("--out", out, [weights])
    subject = None
    network: Any
    if examples is not None or opening["data"] is not None or ":" not in model:
        subject = load_subject(model, **opening)
        network = subject.model
    else:
        family, _, size = model.partition(":")
        from loka.models import build, names

        torch.manual_seed(opening["seed"])
        network = build(family, size) if family in names() else build_own(model, {}, seed=opening["seed"])
    if weights is not None:
        load_weights_from(network, weights)
    extra: dict[str, Any] = {}
    if subject is not None and examples is not None:
        from loka.cli.probe import make_score

        score, _ = make_score(subject, subject.metrics[0], examples)
        extra = {"score": score, "metric": subject.metrics[0], "progress": tell}
    summary = quantize_model(network.eval(), **options, **extra)
    save(network, summary, out)
    return network, summary


def tell(site: str, number: int, total: int) -> None:
    """Print progress to stderr."""
    typer.echo(f"[{number + 1}/{total}] {site}", err=True)
