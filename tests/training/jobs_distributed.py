"""What the ranks of the distributed training tests run."""

import os
import signal
from typing import Any

import torch.distributed as dist

from loka.training import Callback, TrainConfig
from loka.training.distributed import DistributedTrainer, Distribution
from training.toy import ToyBatch, ToySplit, make_data, make_model


class DieAt(Callback):
    """Kill this process at the beginning of a step."""

    name = "die"
    every_rank = True

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == self.step and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def uneven() -> ToySplit:
    """Of batches of 48 the first of two ranks has two, the second one."""
    whole = make_data().valid.whole
    return ToySplit(ToyBatch(whole.ids[:97], whole.dense[:97], whole.labels[:97]))


def train(
    out: str | None, steps: int, rows: str, collectives: str | None, resume: bool, die: tuple[int, int] | None = None,
    dense: str = "fsdp", recipe: str | None = None, dropout: float = 0.0,
) -> dict:  # fmt: skip
    config = TrainConfig(
        steps=steps,
        batch_size=48,
        device="cpu",
        log_every=5,
        checkpoint_every=4 if out else 0,
        clip_norm=1.0,
        learning_rate=1e-2,
    )
    callbacks = [] if die is None else [DieAt(*die)]
    trainer = DistributedTrainer(
        make_model(dropout=dropout), make_data(), config, Distribution(rows=rows, collectives=collectives, dense=dense), recipe=recipe, out=out, callbacks=callbacks
    )  # fmt: skip
    result = trainer.fit(resume=resume)
    weights = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in trainer.module.state_dict().items()
    }
    wire = None if trainer.wire is None else trainer.wire.bytes
    return {
        "weights": weights,
        "loss": result.loss,
        "examples": result.examples,
        "seconds": result.seconds,
        "resumed": result.resumed_from,
        "wire": wire,
        "valid": trainer.evaluate(),
        "uneven": trainer.evaluate(uneven()),
    }


def ragged_task() -> Any:
    """Histories of 2 to 8 items, so that ranks have different numbers of predictions."""
    import torch

    from loka.data.batch import Jagged
    from loka.data.sequences import SequenceData
    from loka.training import NextItemTask

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 10, (120,), generator=generator)
    values = torch.randint(1, 25, (int(lengths.sum()),), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return NextItemTask(SequenceData("toy", Jagged(values, offsets), 24), length=8)


def make_hstu() -> Any:
    from loka.models import build
    from loka.training import seed_everything

    seed_everything(0)
    return build("hstu", "tiny", items=25, max_length=8, dropout=0.0)


def hstu_config(steps: int, checkpoints: int = 0) -> TrainConfig:
    return TrainConfig(steps=steps, batch_size=24, device="cpu", log_every=5, checkpoint_every=checkpoints, learning_rate=1e-2, evaluate_every=0, compile="off")  # fmt: skip


def train_hstu(out: str | None, steps: int, dense: str, resume: bool) -> dict:
    from loka.training.distributed import share_loss

    task = ragged_task()
    trainer = DistributedTrainer(
        make_hstu(), task, hstu_config(steps, 3 if out else 0), Distribution(dense=dense), out=out, whole=True, loss_fn=share_loss(task)
    )  # fmt: skip
    result = trainer.fit(resume=resume)
    named = trainer.module.state_dict().items()
    weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in named}
    return {"weights": weights, "resumed": result.resumed_from}


def make_table_plan() -> bytes:
    """int8 rows, and codecs both ways."""
    import msgspec

    from loka.records import CollectivePlan, Plan, capture_environment, to_json
    from loka.units import find_tables
    from loka.units.tables import row_bytes

    tables = [msgspec.structs.replace(t, rows="int8:row", bytes=row_bytes("int8:row", t.count, t.width)) for t in find_tables(make_model(dropout=0.0))]  # fmt: skip
    codecs = (("weights", "int8:1x128"), ("gradients", "e4m3:1x128:pow2:stochastic"))
    sent = [CollectivePlan(name=name, codec=codec, elements=1, bytes=1, float32_bytes=4) for name, codec in codecs]
    return to_json(
        Plan(
            model="toy", recipe="auto", target=None, max_error=1.0, max_gradient_error=1.0, min_speedup=None, flops_of="sites", sites=[],
            environment=capture_environment(device="cpu", threads=1), tables=tables, collectives=sent,
        )
    )  # fmt: skip


def train_planned(dense: str, plan: bytes) -> dict:
    """A plan with tables and collectives, placed by the trainer and taken back."""
    import loka
    from loka.comms.placement import clock_of, wire_of
    from loka.records import Plan, from_json
    from loka.units import find_tables

    config = TrainConfig(steps=3, batch_size=48, device="cpu", log_every=5, learning_rate=1e-2, seed=5)
    trainer = DistributedTrainer(
        make_model(dropout=0.0), make_data(), config, Distribution(dense=dense), plan=from_json(plan, Plan)
    )
    trainer.fit()
    clock = clock_of(trainer.model)
    assert (clock.step, clock.seed) == (2, 5), "stochastic rounding does not follow the trainer's steps"
    kinds = [t.rows for t in find_tables(trainer.module)]
    wire = dict(trainer.wire.by_op)
    loka.revert(trainer.model)
    held = wire_of(trainer.model)
    return {"kinds": kinds, "wire": wire, "notes": trainer.conversion.notes, "encoding": held is not None and held.codec is not None}  # fmt: skip
