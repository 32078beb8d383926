"""What the ranks of the sharded training tests run: Probe, one plan, convert, train, checkpoint, resume; every part of it comes back for comparison."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import loka
from loka.comms.planning import plan_together
from loka.data import load
from loka.models import build_ranker
from loka.nn.wrapping import unwrap
from loka.records import Plan, from_json, to_json
from loka.training import Callback, TrainConfig, seed_everything
from loka.training.distributed import DistributedTrainer, Distribution
from loka.training.sharding import CollectionTables

STEPS, HALF = 8, 4


@torch.no_grad()
def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the whole state on every rank, under the keys of the plain model. It must fit on one rank.

    The tables of a Ranker are stacked again under `table.weight`.
    """
    result: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            whole = torch.zeros(
                value.size(), device=value.local_shards()[0].tensor.device if value.local_shards() else "cpu"
            )
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole[row : row + rows, column : column + columns] = shard.tensor
            dist.all_reduce(whole)
            result[name] = whole
        else:
            result[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    for path, module in unwrap(model).named_modules():
        if isinstance(module, CollectionTables):
            parts = [result.pop(f"{path}.collection.embedding_bags.{name}.weight") for name in module.names]
            result[f"{path}.table.weight"] = torch.cat(parts)
    return result


def make_data() -> Any:
    return load("synthetic", rows=4000, dense=4, categorical=5, cardinality=60, max_history=4)


def make_model(data: Any) -> torch.nn.Module:
    seed_everything(0)
    return build_ranker(data.schema, "dlrm", "tiny", d=16, sparse=True)


def settings(steps: int = STEPS, **more: Any) -> TrainConfig:
    options = {"evaluate_every": 0, "checkpoint_every": 0, "keep": 10, "learning_rate": 1e-2, "clip_norm": 1.0, **more}
    return TrainConfig(steps=steps, batch_size=48, device="cpu", log_every=4, compile="off", **options)


class Probing(Callback):
    """A probe over the model while it trains."""

    name, every_rank = "probing", True

    def on_start(self, trainer: Any) -> None:
        self.probe = loka.Probe(trainer.module, every=1, rows=64)

    def on_step_end(self, trainer: Any, log: Any) -> None:
        self.probe.step()


class Seeing(Callback):
    """The whole state when the run begins, restored or not."""

    name, every_rank = "seeing", True

    def on_start(self, trainer: Any) -> None:
        self.state = plain_state(trainer.module)


def judge(probe: Any) -> Plan:
    return probe.evaluate(("rowwise",), samples=4, sources=("rows",), judged_on=("rows",)).plan(
        min_speedup=None, recipe="rowwise"
    )


def journey(out: str, how: dict[str, Any], foreign: bytes | None = None) -> dict[str, Any]:
    """Probe -> plan -> convert -> train -> checkpoint -> resume, on as many ranks as there are."""
    data, distribution = make_data(), Distribution(**how)
    probing = Probing()
    looking = DistributedTrainer(make_model(data), data, settings(3), distribution, callbacks=[probing])
    looking.fit()
    plan = plan_together(probing.probe, judge)
    probing.probe.detach()
    fitted = []
    if foreign is not None:  # a plan of the plain model, in the sharded one
        fitted = sorted(loka.convert(looking.module, from_json(foreign, Plan)).converted)
    seeing = Seeing()
    trainer = DistributedTrainer(
        make_model(data), data, settings(checkpoint_every=HALF), distribution, plan=plan, out=out, callbacks=[seeing]
    )
    result = trainer.fit()
    return {
        "plan": to_json(plan),
        "digest": plan.seal.sha256,
        "converted": sorted(trainer.conversion.converted),
        "foreign": fitted,
        "start": seeing.state,
        "weights": plain_state(trainer.module),
        "loss": result.loss,
        "test": trainer.evaluate(data.test),
        "wire": None if trainer.wire is None else trainer.wire.ratio,
        "embedding_wire": None if trainer.embedding_wire is None else trainer.embedding_wire.bytes_per_element,
    }


def train(how: dict[str, Any]) -> dict[str, Any]:
    """A run in float32, without a plan."""
    data = make_data()
    trainer = DistributedTrainer(make_model(data), data, settings(), Distribution(**how))
    trainer.fit()
    return {"weights": plain_state(trainer.module), "test": trainer.evaluate(data.test)}


def resume(out: str, how: dict[str, Any], plan: bytes) -> dict[str, Any]:
    """Go on from the newest checkpoint of a folder: the state that was read, and the one at the end."""
    data, seeing = make_data(), Seeing()
    trainer = DistributedTrainer(
        make_model(data), data, settings(checkpoint_every=HALF), Distribution(**how), plan=from_json(plan, Plan), out=out, callbacks=[seeing]
    )  # fmt: skip
    result = trainer.fit(resume=True)
    return {
        "resumed": result.resumed_from,
        "restored": seeing.state,
        "weights": plain_state(trainer.module),
        "loss": result.loss,
        "test": trainer.evaluate(data.test),
    }


def digest(state: dict[str, torch.Tensor]) -> str:
    """Of all bits of a state."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def keep_half(whole: str, half: Path) -> None:
    """A run's folder as it was when its first checkpoint had just been written."""
    import shutil

    name = f"step-{HALF:08d}"
    shutil.copytree(Path(whole) / "checkpoints" / name, half / "checkpoints" / name)
