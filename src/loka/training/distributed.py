"""Training on many processes, started by torchrun: tables on every rank or sharded by TorchRec, the dense part under FSDP2 or DDP, checkpoints by DCP.

    torchrun --nproc-per-node 8 -m loka train --distributed --rows int8:row --collectives e4m3:1x128:pow2 --out runs/x
    torchrun --nproc-per-node 8 -m loka train --distributed --sharding row --dense ddp --out runs/y

    with joined("gloo"):
        trainer = DistributedTrainer(model, data, TrainConfig(batch_size=1024), Distribution(sharding="row"), plan=plan, out="runs/x")
        trainer.fit(resume=True)

* How the model lies on the ranks, and what they send, is a `Distribution` (`loka.training.sharding`).
* A plan is converted after the model has been spread; its digest must be the same on every rank. Plans name the plain model's linears, so one plan serves both.
* Without sharding every rank holds all tables, whose optimiser gathers the rows and gradients of a step from all ranks and makes the same update everywhere; only what a batch touched travels.
* `batch_size` is the whole batch, of all ranks together. Each rank reads the same batches and takes its share, so the order of examples, and with it the run, does not depend on the
  number of ranks beyond the last bits of its sums.
* A checkpoint is a folder written by all ranks (torch.distributed.checkpoint) and completed by rank 0 with a rename: one that was interrupted does not exist. It can be resumed with
  another number of ranks, and with FSDP2 where DDP was: DCP shards it anew, the random numbers of stochastic rounding depend on step, table and row alone, and the data's position counts
  whole batches. Other random numbers (dropout) start anew from (seed, rank, step) at every checkpoint, in a run that goes on as in one that is resumed.
* When a rank is gone the others notice in their next collective, call the roll through the store, and raise a RankError that names who is missing.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loka.comms import Agreement, RankError, StepClock
from loka.comms.placement import clock_of, wire_of
from loka.data.batch import Jagged
from loka.nn.tables import Table
from loka.records import Conversion, Plan, to_json
from loka.training.checkpoint import find_checkpoints, prune, read_best, remove_leftovers, step_of, write_best
from loka.training.config import TrainConfig
from loka.training.result import NonFiniteLossError, TrainResult
from loka.training.sequence import SequenceTask
from loka.training.sharding import Distribution, spread_model
from loka.training.snapshot import COUNTERS, seed_everything
from loka.training.stream import EpochStream, TrainData
from loka.training.trainer import Trainer

__all__ = ["DistributedTrainer", "Distribution", "joined", "share_loss", "share_of"]


_JOINED: list[Any] = []  # groups of this process, for as long as it lives


@contextmanager
def joined(backend: str | None = None, *, timeout: float = 600.0) -> Iterator[None]:
    """A process group from torchrun's environment, left at the end.

    Args:
        backend: `gloo` or `nccl`; None: nccl where there are GPUs.
        timeout: seconds a collective may wait for a rank.

    Raises:
        ValueError: torchrun did not start this process.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"--distributed is for processes that torchrun starts, but {', '.join(missing)} are not set; "
            "hint: torchrun --nproc-per-node 2 -m loka train --distributed ..."
        )
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if chosen == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout))
    # Where a DDP model is the last to hold a group, its end waits for gloo's threads with Python's lock in hand, and they wait for the lock: torch releases it for a group alone.
    _JOINED.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_of(batch: Any, rank: int, world: int) -> Any:
    """One rank's examples of a batch, a dataclass of tensors, Jagged rows, dictionaries of these, and None: the r-th of `world` equal stretches."""
    if batch.size % world:
        raise ValueError(f"a batch of {batch.size} examples cannot be shared equally by {world} ranks")
    size = batch.size // world
    own = getattr(batch, "part", None)  # a batch whose tensors do not all lie by examples knows itself
    return _cut(batch, rank * size, (rank + 1) * size) if own is None else own(rank * size, (rank + 1) * size)


def _cut(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop]
    if isinstance(value, Jagged):
        offsets = value.offsets[start : stop + 1]
        return Jagged(value.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    if isinstance(value, dict):
        return {key: _cut(part, start, stop) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cut(getattr(value, f.name), start, stop) for f in fields(value)})
    if value is None:
        return None
    raise ValueError(f"a batch holds a {type(value).__name__}, which has no examples to share")


def share_loss(task: SequenceTask) -> Callable[[nn.Module, Any], tuple[Tensor, Any]]:
    """A task's loss for one of many ranks. Ragged shares have different numbers of predictions, so a rank counts by how many it has: the mean over ranks is then the mean over the
    whole batch, and the run is that of one process."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        value, predictions = task.loss(model, batch)
        own = task.weight(batch)
        total = torch.tensor([float(own)], device=value.device)
        dist.all_reduce(total)
        return value * (own * dist.get_world_size() / total.clamp(min=1.0).squeeze()), predictions

    return loss


class SharedStream(EpochStream):
    """The whole batches of one process, of which this rank takes its share."""

    def __init__(self, split: Any, batch_size: int, *, seed: int, rank: int, world: int) -> None:
        super().__init__(split, batch_size, seed=seed)
        self._share = rank, world

    def __next__(self) -> Any:
        """This rank's examples of the next batch."""
        return share_of(super().__next__(), *self._share)


class DistributedTrainer(Trainer):
    """A Trainer among others. Build it on every rank with the same model, data and settings, inside `joined`.

    Args:
        model: plain, the same weights on every rank; changed in place.
        data: as Trainer's.
        config: as Trainer's; `batch_size` counts all ranks together.
        how: where tables and dense parameters lie, and what is sent.
        plan: convert the model by this plan, once it is spread.
        recipe: or by this recipe, at every linear.
        out: folder of the run, on a file system that all ranks see.
        roll_call: seconds to wait for the others when a collective has failed.
        whole: keep the model in one piece: no table is swapped, and FSDP2 shards it as one unit. For models that read a table's weight beside looking it up, as HSTU's output does.
        options: of Trainer: `loss_fn`, `callbacks`, ...

    Example:
        >>> with joined("gloo"):
        ...     DistributedTrainer(model, data, TrainConfig(steps=100, batch_size=64), Distribution(rows="int8:row"), out="runs/x").fit()
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainData,
        config: TrainConfig | None = None,
        how: Distribution | None = None,
        *,
        plan: Plan | None = None,
        recipe: str | None = None,
        out: str | Path | None = None,
        roll_call: float = 10.0,
        whole: bool = False,
        **options: Any,
    ) -> None:
        if whole and (how or Distribution()).needs_tables:
            raise ValueError(f"whole=True leaves every table where and as it is, but {how} asks otherwise")
        config, self.how = config or TrainConfig(), how or Distribution()
        world = dist.get_world_size()
        _check(config, self.how, world, plan)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )
        if config.device not in ("auto", device.type, str(device)):
            raise ValueError(f"this process group runs on {device}, the request is for {config.device}")
        self.clock, self.roll_call = StepClock(seed=config.seed), roll_call
        tables = {} if plan is None else {table.name: table.rows for table in plan.tables}
        spread = spread_model(
            model.to(device), self.how, learning_rate=config.embedding_learning_rate, device=device, clock=self.clock, tables=tables, whole=whole
        )  # fmt: skip
        self.conversion = _convert(spread.model, plan, recipe, device)
        if (placed := clock_of(spread.model)) is not None:  # the plan says what is sent
            placed.seed, self.clock = config.seed, placed
        self.wire, self.embedding_wire, self.fused = spread.wire or wire_of(spread.model), spread.embedding_wire, spread.fused  # fmt: skip
        super().__init__(spread.model, data, replace(config, device=str(device)), out=out, **options)
        if self.fused is not None:
            self.optimizers.add(self.fused, config.embedding_learning_rate)
        self.stream = SharedStream(data.train, config.batch_size, seed=config.seed, rank=self.ranks.rank, world=world)

    def fit(self, *, resume: bool = False, fallback: bool = False) -> TrainResult:
        """As Trainer's. A rank that is gone is named.

        Args:
            resume: continue from the newest checkpoint of `out`.
            fallback: refused: a distributed checkpoint is complete or does not exist.

        Returns:
            How it went.

        Raises:
            RankError: a rank is gone; the run can be resumed from its last checkpoint.
        """
        try:
            return super().fit(resume=resume, fallback=fallback)
        except RuntimeError as error:
            if not isinstance(error, RankError | NonFiniteLossError) and _is_transport(error):
                _call_roll(self.roll_call, self._saved_step, error)
            raise

    def load_best(self) -> None:
        """Put the weights of the best evaluation into the model."""
        if self.folder is None:
            raise ValueError("the best weights are kept in the folder of the run: pass out=")
        self._load_tensors(read_best(self.folder), optimizer=False)

    def _start(self, resume: bool, fallback: bool) -> None:
        if fallback:
            raise ValueError("a distributed checkpoint is complete or does not exist: there is no fallback to ask for")
        found = [] if self.folder is None else find_checkpoints(self.folder)
        if resume and self.folder is None:
            raise ValueError("resume needs the folder of the run: pass out=")
        if found and not resume and self.step == 0:
            raise ValueError(f"{self.folder} already holds {found[-1].name}; resume it, or choose another folder")
        self._reseed()
        if found:
            self._restore(found[-1])
        elif self.folder is not None and self.ranks.rank == 0:
            remove_leftovers(self.folder)
        for callback in self.callbacks:
            callback.on_start(self)
        self._window_start = time.perf_counter()

    def _train_step(self) -> None:
        self.clock.step = self.step
        super()._train_step()

    def _checkpoint(self) -> None:
        if self._saved_step == self.step:
            return
        assert self.folder is not None
        with self._paused():
            bad = [name for name, tensor in _local_tensors(self.module) if not bool(tensor.isfinite().all())]
            if self.ranks.any(bool(bad), self.device):
                raise NonFiniteLossError(
                    f"weights of {bad[:5] or 'another rank'} are not finite after step {self.step}; nothing was saved"
                )
            self._write()
            self._reseed()
            self._saved_step = self.step

    def _write(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        assert self.folder is not None
        final = self.folder / f"step-{self.step:08d}"
        temporary = self.folder / f".writing-{final.name}"
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        save(self._tensors(), checkpoint_id=temporary)
        if self.ranks.rank == 0:
            (temporary / "state.json").write_text(json.dumps(self._state()) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            best = self.monitor.best
            if best is not None and best["step"] == self.step:
                write_best(self.folder, best)
            prune(self.folder, keep=self.config.keep, protect=None if best is None else best["step"])
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(),
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "monitor": self.monitor.state_dict(),
            "metrics": self.metrics,
            "stream": self.stream.state_dict(),
            "world": self.ranks.world,
            "distribution": self._essentials(),
        }

    def _essentials(self) -> dict[str, Any]:
        """What a resumed run must share; where things lie may change."""
        how = self.how
        columns = how.columns if how.sharding == "column" else 1
        plan = None if self.conversion is None else self.conversion.plan or sorted(self.conversion.converted.items())
        asked = {"rows": how.rows, "collectives": how.collectives, "embeddings": how.embeddings, "plan": plan}
        found: dict[str, Any] = json.loads(
            json.dumps({**asked, "columns": columns, "sharded": how.sharding is not None})
        )
        return found

    def _tensors(self) -> dict[str, Any]:
        self._prepare_optimizer()
        tensors = {"model": self.module.state_dict(), "optimizer": self.optimizers.state_tensors()}
        return tensors if self.fused is None else {**tensors, "tables": self.fused.tensors()}

    def _prepare_optimizer(self) -> None:
        """Adam makes its state in the first step; a checkpoint to load needs somewhere to go before."""
        for optimizer, _ in self.optimizers._parts:
            if isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if not optimizer.state[parameter]:
                            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                            step = torch.zeros((), dtype=torch.float32, device=self.device)
                            optimizer.state[parameter] = {"step": step, **moments}

    def _load_tensors(self, path: Path, *, optimizer: bool = True) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        tensors = self._tensors()
        state = tensors.pop("optimizer")
        if not optimizer:
            tensors.pop("tables", None)
        if optimizer:  # copies: the codes of a table are its own, and loading its weight would round them
            tensors["optimizer"] = {name: tensor.clone() for name, tensor in state.items()}
        load(tensors, checkpoint_id=path)
        self.module.load_state_dict(tensors["model"])
        if optimizer:
            self.optimizers.load_state_tensors(tensors["optimizer"])

    def _restore(self, path: Path) -> None:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if changes := self.config.changes_since(TrainConfig.from_json(state["config"])):
            raise ValueError(f"cannot resume with other settings ({'; '.join(changes)}); resume with the stored ones")
        stored, mine = state["distribution"], self._essentials()
        if changes := [f"{name} was {stored[name]}, now {mine[name]}" for name in mine if stored[name] != mine[name]]:
            raise ValueError(
                f"cannot resume with another distribution ({'; '.join(changes)}); resume with the stored one"
            )
        self._load_tensors(path)
        self.stream.load_state_dict(state["stream"])
        for name, value in state["counters"].items():
            setattr(self, name, value)
        self.metrics = state["metrics"]
        self.monitor.load_state_dict(state["monitor"])
        self._reseed()
        self._resumed_from = self._saved_step = step_of(path)

    def _reseed(self) -> None:
        """Random numbers from here on are of (seed, rank, step), so that a run that goes on and one that is resumed draw the same."""
        seed_everything(hash((self.config.seed, self.ranks.rank, self.step)) % 2**63)


def _local_tensors(model: nn.Module) -> Sequence[tuple[str, Tensor]]:
    """What this rank holds, table by table and shard by shard."""
    named = [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in model.named_parameters()]
    tables = [(name, part) for name, m in model.named_modules() if isinstance(m, Table) for part in m.witnesses()]
    return [(name, tensor.detach()) for name, tensor in [*named, *tables]]


def _convert(model: nn.Module, plan: Plan | None, recipe: str | None, device: torch.device) -> Conversion | None:
    """The plan or recipe, placed in the model as it lies on the ranks, once all of them have the same."""
    if plan is None and recipe is None:
        return None
    from loka.placing import convert, scale_state

    asked = to_json(plan) if plan is not None else str(recipe).encode()
    Agreement(device=device, name="plan").compare("the plan", asked)
    done = convert(model, plan, recipe=recipe)
    if remembered := sorted(scale_state(model)):
        raise ValueError(
            f"{', '.join(remembered[:5])}: scales that are remembered between steps are each rank's own, and no checkpoint could be resumed with another number of ranks; "
            "hint: a plan with dynamic scales and without chains"
        )
    return done


def _is_transport(error: RuntimeError) -> bool:
    """Whether a collective failed, and not the model."""
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out", "processgroup"))


def _call_roll(timeout: float, saved: int | None, error: RuntimeError) -> None:
    """Name who is missing; return where everybody answers."""
    try:
        Agreement(timeout=timeout, name="roll call").meet("after a failed collective")
    except RankError as missing:
        kept = "no checkpoint was written" if saved is None else f"the last checkpoint is of step {saved}"
        raise RankError(f"training stopped: {missing}; {kept}", missing.ranks) from error


def _check(config: TrainConfig, how: Distribution, world: int, plan: Plan | None) -> None:
    problems = []
    if plan is not None and plan.collectives and how.collectives is not None:
        problems.append(f"the plan says what is sent in which codec, and so does collectives={how.collectives!r}; give one of them")  # fmt: skip
    if plan is not None and plan.tables and how.sharding is not None:
        problems.append("the plan gives tables formats of rows, and TorchRec's kernels train float32 rows only; hint: sharding=None")  # fmt: skip
    if config.batch_size % world:
        problems.append(
            f"batch_size {config.batch_size} is of all {world} ranks together and must be a multiple of {world}"
        )
    if config.compile == "on":
        problems.append("compilation is not part of it yet")
    if how.sharding is not None and config.accumulate > 1:
        problems.append("sharded tables are updated in every backward pass, so batches cannot be accumulated")
    if problems:
        raise ValueError(f"these settings cannot be trained on {world} processes: {'; '.join(problems)}")
