"""`loka analyze`: compare the distributions of weights and activations of several models.

    loka analyze onerec:tiny wukong:small                     built-in models as initialized
    loka analyze runs/onerec runs/ranker model.safetensors    a recommender, a `loka train` run, any checkpoint on disk
    loka analyze runs/onerec pkg.module:factory --out analysis.json

Reported per layer: variance, AbsMax, AbsP99, kurtosis, and the range inside scaling groups; per trained model: a
verdict, LLM-like, ranker-like or between. Activations come from a few batches of the model's data (--batches); a file
has weights only. Published values of rankers and language models are printed for comparison; they are not measured
here. `loka report analysis.json` plots the record. Exit 2 if the request is invalid.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    from loka.records import Analysis, ModelStats


def analyze(
    models: Annotated[list[str], typer.Argument(help="Folder, .safetensors file, family:size or pkg.module:factory.")],
    data: Annotated[str | None, typer.Option(help="Data for the activations; default: the model's.")] = None,
    batches: Annotated[int, typer.Option(help="Batches of data to run; 0: weights only.")] = 2,
    layers: Annotated[bool, typer.Option("--layers", help="Print every layer, not only the extremes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    trained: Annotated[
        bool, typer.Option("--trained", help="pkg.module:factory returns a trained model: give it a verdict.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of untrained models.")] = 0,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Summarize the distributions of weights and activations, with a verdict per model."""
    from loka import records
    from loka.ptq import REFERENCES

    check_file("--out", out, models)
    if batches < 0:
        raise ValueError(f"--batches {batches}: expected 0 or more")
    if trained and not any("." in model.partition(":")[0] and ":" in model for model in models):
        raise ValueError(
            "--trained applies to pkg.module:factory, and none was given; runs and files are trained, built-in models are not"
        )
    found = [look(model, data, batches, seed, data_root, source, trained) for model in models]
    record = records.Analysis(models=found, references=REFERENCES, environment=records.capture_environment())
    if out is not None:
        records.save(record, out)
    typer.echo(records.to_json(record).decode() if json_ else table(record, every=layers))


def look(
    model: str, data: str | None, batches: int, seed: int, root: Path | None, source: Path | None, trained: bool = False
) -> ModelStats:
    """Analyze one model, given as a folder, a file, `family:size` or `pkg.module:factory`."""
    from loka.inference import is_bundle
    from loka.ptq import analyze_checkpoint, analyze_model

    if is_bundle(model):
        return look_at_bundle(Path(model), data, batches, root, source)
    if model.endswith(".safetensors"):
        return analyze_checkpoint(model)
    if (Path(model) / "model.json").is_file():
        return look_at_run(Path(model), batches, root, source)
    if Path(model).exists():
        weights = Path(model) / "model.safetensors"
        hint = f"; hint: {weights} has its weights" if weights.is_file() else ""
        raise ValueError(f"{model}: expected a .safetensors file, or the folder of a run or of a recommender{hint}")
    if model.partition(":")[0] == "onerec":
        return look_at_onerec(model, batches, seed)
    from loka.cli.subject import load_subject

    subject = load_subject(model, data, batch_size=512, seed=seed, root=root, source=source)

    def run(network: Any) -> None:
        for batch in islice(subject.stream("train"), batches):
            subject.loss(batch)

    own = trained and "." in model.partition(":")[0]
    seen = f"{batches} batches of {subject.data}"
    return analyze_model(
        subject.model, name=model, source="built here", run=run if batches else None, activations_of=seen, trained=own
    )


def look_at_run(folder: Path, batches: int, root: Path | None, source: Path | None) -> ModelStats:
    """Analyze the best weights of a `loka train` run, on training batches of its data."""
    from loka.cli.train import Order, Recipe, prepare
    from loka.ptq import analyze_model
    from loka.training import TrainConfig
    from loka.training.checkpoint import read_best

    recipe = Recipe(**json.loads((folder / "model.json").read_text(encoding="utf-8")))
    order = Order(recipe, TrainConfig(), root=root, source=source, weights=read_best(folder / "checkpoints"))
    data, network = prepare(order)

    def run(model: Any) -> None:
        for number, batch in enumerate(data.train.batches(512, shuffle=True, seed=0)):
            if number == batches:
                return
            model(batch)

    seen = f"{batches} batches of {data.name}"
    return analyze_model(network, name=folder.name, source="run", run=run if batches else None, activations_of=seen)


def look_at_onerec(model: str, batches: int, seed: int) -> ModelStats:
    """Analyze an untrained OneRec on random histories: it reads semantic ids, which data sets do not contain."""
    import torch

    from loka.data.batch import Jagged
    from loka.inference.request import make_histories
    from loka.models import build
    from loka.ptq import analyze_model

    torch.manual_seed(seed)
    network: Any = build("onerec", model.partition(":")[2] or "tiny")

    def run(it: Any) -> None:
        for number in range(batches):
            rows = [r.history for r in make_histories(it.config, 8, it.config.context, seed=seed + number)]
            offsets = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
            it(Jagged(torch.cat(rows), offsets), torch.stack([r[-1, : it.config.levels] for r in rows]))

    seen = f"{batches} batches of random histories"
    return analyze_model(
        network, name=model, source="built here", run=run if batches else None, activations_of=seen, trained=False
    )


def look_at_bundle(folder: Path, data: str | None, batches: int, root: Path | None, source: Path | None) -> ModelStats:
    """Analyze a generative recommender on test histories of its data."""
    import numpy as np
    import torch

    from loka.data.batch import Jagged
    from loka.inference import load_bundle
    from loka.inference.recommender import spell
    from loka.ptq import analyze_model

    bundle = load_bundle(folder)
    if not batches:
        return analyze_model(bundle.model, name=folder.name, source=str(folder.name))
    opened = bundle.open_data(data, root=root, source=source)

    def run(model: Any) -> None:
        for number in range(batches):
            rows = np.arange(64 * number, min(64 * (number + 1), len(opened.test)))
            cut = opened.test.cut(rows, model.config.context)
            known = torch.isin(cut.history.values, bundle.index.items)
            counts = torch.cat([known.new_zeros(1, dtype=torch.int64), known.long().cumsum(0)])
            offsets = counts[cut.history.offsets]
            first = cut.targets.values[cut.targets.offsets[:-1]]
            codes = bundle.index.codes_of(
                torch.where(torch.isin(first, bundle.index.items), first, bundle.index.items[0])
            )
            model(Jagged(spell(cut.history.values[known], bundle.index, model.config), offsets), codes)

    seen = f"{batches} batches of {opened.name}, test histories"
    return analyze_model(bundle.model, name=folder.name, source=str(folder.name), run=run, activations_of=seen)


def table(record: Analysis, *, every: bool) -> str:
    """Format the extreme layers of each model and kind as a table, or every layer."""
    head = f"{'model':24} {'layer':36} {'kind':10} {'variance':>10} {'AbsMax':>9} {'AbsP99':>9} {'kurtosis':>9} {'crest':>9} {'zeroed':>8}"
    lines = [head]
    for model in record.models:
        for kind in ("weight", "activation"):
            chosen = [layer for layer in model.layers if layer.kind == kind]
            if not every and chosen:
                picks = {max(chosen, key=lambda x: x.variance).name, max(chosen, key=lambda x: x.absmax).name}
                picks |= {max(chosen, key=lambda x: x.kurtosis).name, min(chosen, key=lambda x: x.variance).name}
                chosen = [layer for layer in chosen if layer.name in picks]
            for x in chosen:
                row = next(group for group in x.groups if group.spec == "e4m3:row")
                lines.append(
                    f"{model.name[:24]:24} {_shorten(x.name):36} {x.kind:10} {x.variance:10.3g} {x.absmax:9.3g} {x.abs_p99:9.3g} "
                    f"{x.kurtosis:9.2f} {row.crest_bits:9.1f} {row.underflow:8.2%}"
                )
    lines.append(
        "crest: the largest magnitude of a row over its root mean square, in bits (99th percentile); zeroed: "
        "share that E4M3 with one scale per row rounds to 0"
    )
    lines += [f"{m.name}: {m.likeness} ({'; '.join(m.reasons)})" for m in record.models]
    lines += [
        f"published, not measured here: {r.label.replace(' (published)', '')}: {r.statistic} {r.value:g}"
        for r in record.references
    ]
    return "\n".join(lines)


def _shorten(name: str, width: int = 36) -> str:
    """Truncate a long name at its start, because its end tells layers apart."""
    return name if len(name) <= width else f"…{name[1 - width :]}"
