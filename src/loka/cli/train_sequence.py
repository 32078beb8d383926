"""`loka train` for sequence models: the same loop, other data, and HR@10, NDCG@10 instead of AUC.

    loka train --model hstu --config small --data amazon-2018-scientific --steps 1000 --batch-size 256 --out runs/h
    loka train --model onerec --config small --data amazon-2018-scientific --steps 2000 --set items=true --out runs/o

For HSTU an example is a user's history, for OneRec one item of a history and the items before it. Besides the options
of the model, `--set` takes

    beams=50            OneRec: width of the beam search that ranks the held-out item
    ids=NAME            OneRec: an index that comes with the data, or a file written by `SemanticIndex.save`; default:
                        made from training histories and item texts with the model's codebooks, and written to
                        index.safetensors
    items=true          OneRec: also embed the items themselves in the history
    evaluate_users=2000 number of validation users per evaluation; default: all. The test split is always complete.

With `--out` a OneRec is written as a recommender: model.safetensors, index.safetensors and bundle.json, a folder that
`loka quantize`, `generate`, `ab` and `serve` take.

Histories are ragged, so there is no static shape to compile: `--compile` is not supported, nor is `--mods`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from loka.cli.train import Order, Recipe
    from loka.data import SequenceData
    from loka.inference import Bundle
    from loka.semantic_ids import SemanticIndex
    from loka.training import TrainConfig, Trainer
    from loka.training.sequence import Part, SequenceTask

FAMILIES = ("hstu", "onerec")
MONITOR = "ndcg@10"
# `loka generate --train`: trains in seconds on a CPU. Enough to look at recommendations, not to judge quality.
SMALL = {"d": 64, "layers": 2, "d_ff": 192, "context": 50, "short": 10, "codebooks": (64, 64, 64), "items": True}


@dataclass(frozen=True)
class SequenceJob:
    """A model, its task, and how the trainer uses them."""

    network: nn.Module
    task: SequenceTask
    settings: TrainConfig
    evaluate_users: int | None

    def hooks(self) -> dict[str, Any]:
        """Return the loss and evaluation functions as arguments of the Trainer."""
        return {
            "loss_fn": self.task.loss,
            "evaluate_fn": lambda model: self._evaluate(model, "valid", self.evaluate_users),
        }

    def test(self, trainer: Trainer) -> dict[str, float]:
        """Evaluate the current weights on the whole test split."""
        return self._evaluate(trainer.module, "test", None)

    def _evaluate(self, model: nn.Module, part: Part, limit: int | None) -> dict[str, float]:
        from loka.training.precision import resolve_device

        return self.task.evaluate(
            model,
            part,
            batch_size=self.settings.evaluate_batch_size or 256,
            device=resolve_device(self.settings.device),
            precision=self.settings.precision,
            limit=limit,
        )


def check_request(model: str, compile_: bool | None, mods: str | None, out: Path | None) -> None:
    """Reject options that sequence models do not support, and a folder whose recommender is of another command."""
    if out is not None and (out / "bundle.json").exists() and not (out / "checkpoints").exists():
        raise ValueError(f"--out {out}: holds a recommender that loka train did not make; give a new folder")
    if compile_:
        raise ValueError(f"{model} reads ragged histories, which have no static shape: leave --compile out")
    if mods:
        raise ValueError(f"--mods recovers ranking models only, not {model}: use loka.mods in Python")


def prepare_sequence(order: Order) -> SequenceJob:
    """Prepare data, semantic ids, model and task, seeded; print the stages of a first build of the data to stderr."""
    import torch

    from loka.cli.train import tell_stages
    from loka.data import load_sequences
    from loka.inference.bundle import INDEX
    from loka.models import build, configure
    from loka.training import load_weights, seed_everything
    from loka.training.sequence import NextIdTask, NextItemTask

    recipe = order.recipe
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    options = dict(recipe.model_options)
    users = options.pop("evaluate_users", None)
    if users is not None and (type(users) is not int or users < 1):
        raise ValueError(f"evaluate_users={users!r}, expected a positive number of users")
    where: dict[str, Any] = {"root": order.root, "source": order.source}
    data = load_sequences(recipe.data, **where, progress=tell_stages(), **recipe.data_options)
    task: SequenceTask
    if recipe.model == "hstu":
        config = configure("hstu", recipe.config, **options | {"items": data.n_items + 1})
        task = NextItemTask(data, length=config.max_length)
    else:
        beams, name = options.pop("beams", 50), options.pop("ids", None)
        if "items" in options:
            options["items"] = data.n_items + 1 if options["items"] else 0
        config = configure("onerec", recipe.config, **options)
        kept = None if order.out is None else order.out / INDEX
        index = find_index(data, name, config.codebooks, kept, resume=order.resume)
        config = configure("onerec", recipe.config, **options | {"codebooks": index.codebook_sizes})
        task = NextIdTask(data, index, length=config.context, beams=beams)
    seed_everything(order.settings.seed)
    network = build(config)
    if order.weights is not None:
        load_weights(network, order.weights)
    return SequenceJob(network, task, order.settings, users)


def make_bundle(job: SequenceJob, trainer: Trainer, recipe: Recipe, *, loss: float | None) -> Bundle | None:
    """Return a trained OneRec as a recommender's bundle, or None for other models."""
    from loka.inference import Bundle
    from loka.models.onerec import OneRec
    from loka.ptq import quantize
    from loka.records import BundleInfo, capture_environment
    from loka.training.sequence import NextIdTask

    if not isinstance(job.task, NextIdTask) or not isinstance(trainer.module, OneRec):
        return None
    info = BundleInfo(
        data=recipe.data,
        settings=recipe.data_options,
        steps=trainer.step,
        seed=job.settings.seed,
        loss=loss,
        normalize="valid",
        environment=capture_environment(),
    )
    model = trainer.module.eval()
    return Bundle(model, quantize(model, "none"), job.task.index, info)


def train_small(data: str, out: Path, *, steps: int, seed: int, root: Path | None, source: Path | None) -> None:
    """Train a small OneRec on a data set's sequences and write it to a folder, without evaluation or checkpoints."""
    import typer

    from loka.cli.train import Order, Recipe
    from loka.inference import save_bundle
    from loka.training import Progress, TrainConfig, Trainer

    recipe = Recipe("onerec", "small", SMALL, data, {})
    settings = TrainConfig(
        steps=steps, batch_size=128, seed=seed, learning_rate=2e-3, weight_decay=0.01, schedule="cosine",
        warmup_steps=min(50, steps), evaluate_every=0, compile="off", monitor=MONITOR,
    )  # fmt: skip
    job = prepare_sequence(Order(recipe, settings, root=root, source=source))
    trainer = Trainer(job.network, job.task, settings, callbacks=[Progress()], **job.hooks())
    result = trainer.fit()
    bundle = make_bundle(job, trainer, recipe, loss=result.loss)
    assert bundle is not None  # it is a OneRec
    save_bundle(bundle, out)
    typer.echo(f"{bundle.index!r}; trained {steps} steps, loss {result.loss:.3f}; kept in {out}", err=True)


def find_index(
    data: SequenceData, name: str | None, codebooks: tuple[int, ...], kept: Path | None, *, resume: bool
) -> SemanticIndex:
    """Return the semantic ids of a run and write them to `kept`: those it already has, the named ones, or new ones."""
    import torch

    from loka.semantic_ids import ResidualKMeans, SemanticIndex, fit_semantic_ids, load_index, resolve_collisions
    from loka.training.sequence import embed_items

    numbers = torch.arange(1, data.n_items + 1)
    if resume and kept is not None and kept.exists():
        return load_index(kept)
    if name is None:
        index = fit_semantic_ids(embed_items(data), ResidualKMeans(codebooks), collisions="level", items=numbers)
    elif name in data.semantic_id_names:
        table = data.semantic_ids(name)
        missing = sorted(set(numbers.tolist()) - set(table))
        if missing:
            raise ValueError(f"ids={name}: {len(missing)} items have no id, e.g. item {missing[0]}")
        codes = torch.tensor([table[int(item)] for item in numbers])
        index = SemanticIndex(codes, tuple(int(size) + 1 for size in codes.amax(0)), numbers)
    elif Path(name).is_file():
        index = load_index(name)
    else:
        raise ValueError(
            f"ids={name!r} is neither a file nor among the indexes of {data.name}: {data.semantic_id_names}"
        )
    if index.colliding:
        index = resolve_collisions(index, "level")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        index.save(kept)
    return index
