"""`loka train --distributed`: the same run as one of torchrun's processes, see `loka.training.distributed`.

    torchrun --nproc-per-node 8 -m loka train --distributed --sharding row --dense ddp --plan plan.json --out runs/y

Here the options become a `Distribution`; rank 0 prints and writes the records.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from loka.cli.train import Order
    from loka.training import Callback, Trainer
    from loka.training.sharding import Distribution


def check_tables(
    model: str, how: Distribution | None, *, is_sequence: bool, mods: str | None, distributed: bool
) -> None:
    """Reject models and options that low-precision tables or several processes do not support."""
    problems = []
    if is_sequence and (how is None or how.needs_tables):
        problems.append("sequence models tie their tables to the output: they keep float32 rows, on every rank")
    if model == "onerec" and distributed:
        problems.append(
            "onerec's beam search calls parts of the model directly, and no rank holds them whole; hint: "
            "hstu trains on many processes"
        )
    if mods and distributed:
        problems.append("--mods rewrites a model in one process; hint: rewrite it first, then give --from")
    if problems:
        raise ValueError(f"--rows and --distributed cannot be honoured: {'; '.join(problems)}")


def read_distribution(distributed: bool, *, rows: str | None, **options: str | None) -> Distribution | None:
    """Return how the model is distributed over ranks; None for a single process, which takes none of these options."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if not distributed:
        if given:
            names = ", ".join(f"--{name}" for name in given)
            raise ValueError(f"{names}: needs --distributed, several processes that shard and exchange tensors")
        return None
    from loka.training.sharding import Distribution

    pair = given.pop("embeddings", None)
    if pair is not None:
        pair = tuple(part.strip() for part in pair.split(","))
        if len(pair) != 2:
            raise ValueError(f"--embeddings takes two codecs, forward,backward, got {','.join(pair)!r}")
    return Distribution(rows=rows or "float32", embeddings=pair, **given)


def run_distributed(order: Order, how: Distribution, *, as_json: bool) -> None:
    """Run as one of several processes; only rank 0 prints and writes records."""
    from loka import records
    from loka.cli import train_sequence
    from loka.cli.train import finish, prepare, tell
    from loka.training import Curve, JsonlLog, Trainer
    from loka.training.distributed import DistributedTrainer, joined, share_loss

    with joined():
        import torch.distributed as dist

        hooks: dict[str, Any] = {}
        out = order.out
        if order.recipe.model in train_sequence.FAMILIES:
            job = train_sequence.prepare_sequence(order)
            data: Any = job.task
            network: nn.Module = job.network
            test: Callable[[Trainer], dict[str, float]] = job.test
            hooks = {**job.hooks(), "loss_fn": share_loss(job.task), "whole": True}
        else:
            data, network = prepare(order)
            test = partial(Trainer.evaluate, split=data.test)
        curve = Curve()
        callbacks: list[Callback] = [curve] if out is None else [curve, JsonlLog(out / "log.jsonl")]
        plan = None if order.plan is None else records.Plan.load(order.plan)
        trainer = DistributedTrainer(
            network, data, order.settings, how, plan=plan, recipe=order.fp8, out=out, callbacks=callbacks, **hooks
        )
        result = trainer.fit(resume=order.resume, fallback=order.fallback)
        first = dist.get_rank() == 0
        run = finish(trainer, result, order.recipe, test, curve, out, trainer.conversion, write=first)
        if first:
            if trainer.conversion is not None:
                typer.echo(f"{trainer.conversion}; not guarded: --guard is for a single process", err=True)
                if out is not None:
                    records.save(trainer.conversion, out / "conversion.json")
            for what, wire in (("dense", trainer.wire), ("embeddings", trainer.embedding_wire)):
                if wire is not None and wire.elements:  # a single rank sends nothing
                    typer.echo(f"{what}: sent {wire.ratio:.3f} of the bytes of float32", err=True)
            tell(result, run, None, as_json=as_json)
