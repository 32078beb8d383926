"""Training on several processes started by torchrun: replicated or sharded tables, FSDP2 or DDP, DCP checkpoints.

    torchrun --nproc-per-node 8 -m loka train --distributed --rows int8:row --collectives e4m3:1x128:pow2 --out runs/x
    torchrun --nproc-per-node 8 -m loka train --distributed --sharding row --dense ddp --out runs/y

    with joined("gloo"):
        how = Distribution(sharding="row")
        trainer = DistributedTrainer(model, data, TrainConfig(batch_size=1024), how, plan=plan, out="runs/x")
        trainer.fit(resume=True)

* A `Distribution` (`loka.training.sharding`) says how the model is placed on the ranks and what they send.
* A plan is applied after the model has been distributed; its digest must be the same on every rank. Plans name the
  linears of the plain model, so the same plan serves both.
* Without sharding every rank holds all tables. Their optimizer gathers the touched rows and gradients of a step from
  all ranks and makes the same update everywhere.
* `batch_size` is that of all ranks together. Each rank reads the same batches and takes its share, so the order of
  examples, and with it the run, does not depend on the number of ranks beyond the last bits of sums.
* A checkpoint is a folder written by all ranks (torch.distributed.checkpoint) and completed by rank 0 with a rename, so
  an interrupted one does not exist. It can be resumed with another number of ranks, and with FSDP2 instead of DDP: DCP
  reshards it, stochastic rounding depends on step, table and row only, and the data position counts whole batches.
  Other random numbers (dropout) are reseeded from (seed, rank, step) at every checkpoint, resumed or not.
* If a rank is gone, the others notice in their next collective, check through the store who is left, and raise a
  RankError that names the missing ranks.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
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
from loka.records import Conversion, Plan, to_json
from loka.records.prose import name_some
from loka.training.checkpoint import keep_best, read_best, remove_leftovers, step_of
from loka.training.config import TrainConfig
from loka.training.result import NonFiniteLossError, TrainResult
from loka.training.sequence import SequenceTask
from loka.training.sharding import Distribution, spread_model
from loka.training.snapshot import describe_run, find_nonfinite, restore_run, seed_everything
from loka.training.stream import EpochStream, TrainData
from loka.training.trainer import Trainer

__all__ = ["DistributedTrainer", "Distribution", "joined", "share_loss", "share_of"]


_JOINED: list[Any] = []  # process groups, kept alive until the process ends


@contextmanager
def joined(backend: str | None = None, *, timeout: float = 600.0) -> Iterator[None]:
    """Join a process group from torchrun's environment, and leave it at the end of the block.

    Args:
        backend: `gloo` or `nccl`; None uses nccl if there are GPUs.
        timeout: seconds that a collective may wait for a rank.

    Raises:
        ValueError: this process was not started by torchrun.
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
    # If a DDP model is the last to hold a group, its destructor waits for gloo's threads while holding the GIL, and
    # they wait for the GIL: torch only releases it when a group itself is destroyed.
    _JOINED.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_of(batch: Any, rank: int, world: int) -> Any:
    """Return one rank's examples of a batch: the r-th of `world` equal sections.

    A batch is a dataclass of tensors, Jagged rows, dictionaries of these, and None.
    """
    if batch.size % world:
        raise ValueError(f"a batch of {batch.size} examples cannot be shared equally by {world} ranks")
    size = batch.size // world
    own = getattr(batch, "part", None)  # a batch with tensors that are not indexed by examples cuts itself
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
    """Return a task's loss for one of several ranks.

    Ragged shares have different numbers of predictions, so each rank is weighted by its number. The mean over ranks is
    then the mean over the whole batch, as in a single process.
    """

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        value, predictions = task.loss(model, batch)
        own = task.weight(batch)
        total = torch.tensor([float(own)], device=value.device)
        dist.all_reduce(total)
        return value * (own * dist.get_world_size() / total.clamp(min=1.0).squeeze()), predictions

    return loss


class SharedStream(EpochStream):
    """The batches of a single process, of which this rank takes its share."""

    def __init__(self, split: Any, batch_size: int, *, seed: int, rank: int, world: int) -> None:
        super().__init__(split, batch_size, seed=seed)
        self._share = rank, world

    def __next__(self) -> Any:
        return share_of(super().__next__(), *self._share)


class DistributedTrainer(Trainer):
    """A Trainer on one of several ranks. Create it on every rank with the same arguments, inside `joined`.

    Args:
        model: a plain model, with the same weights on every rank; changed in place.
        data: see Trainer.
        config: see Trainer; `batch_size` counts all ranks together.
        how: where tables and dense parameters are placed, and what is sent.
        plan: convert the distributed model by this plan.
        recipe: or by this recipe, at every linear.
        out: folder of the run, on a file system that all ranks share.
        roll_call: seconds to wait for the other ranks when a collective has failed.
        whole: replace no table, and let FSDP2 shard the model as one unit. For models that also read the weight of a
            table directly, as HSTU's output layer does.
        options: further arguments of Trainer: `loss_fn`, `callbacks`, ...

    Example:
        >>> with joined("gloo"):
        ...     DistributedTrainer(model, data, TrainConfig(batch_size=64), Distribution(rows="int8:row")).fit()
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
        if (placed := clock_of(spread.model)) is not None:  # the plan defines the collectives
            placed.seed, self.clock = config.seed, placed
        self.wire, self.embedding_wire, self.fused = spread.wire or wire_of(spread.model), spread.embedding_wire, spread.fused  # fmt: skip
        super().__init__(spread.model, data, replace(config, device=str(device)), out=out, **options)
        if self.fused is not None:
            self.optimizers.add(self.fused, config.embedding_learning_rate)
        self.stream = SharedStream(data.train, config.batch_size, seed=config.seed, rank=self.ranks.rank, world=world)

    def fit(self, *, resume: bool = False, fallback: bool = False) -> TrainResult:
        """Train as Trainer does, and name a rank that is gone.

        Args:
            resume: continue from the newest checkpoint of `out`.
            fallback: not supported: a distributed checkpoint is complete or does not exist.

        Returns:
            The outcome of the run.

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
        """Load the weights of the best evaluation into the model."""
        if self.folder is None:
            raise ValueError("the best weights are kept in the folder of the run: pass out=")
        self._load_tensors(read_best(self.folder), optimizer=False)

    def _start(self, resume: bool, fallback: bool) -> None:
        if fallback:
            raise ValueError("a distributed checkpoint is complete or does not exist: there is no fallback to ask for")
        found = self._find_checkpoints(resume)
        self._reseed()
        if found:
            self._restore(found[-1])
        elif self.folder is not None and self.ranks.rank == 0:
            remove_leftovers(self.folder)

    def _train_step(self) -> None:
        self.clock.step = self.step
        super()._train_step()

    def _checkpoint(self) -> None:
        if self._saved_step == self.step:
            return
        assert self.folder is not None
        with self._paused():
            bad = find_nonfinite(self.module)
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
            state = {**describe_run(self), "world": self.ranks.world, "distribution": self._essentials()}
            (temporary / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            keep_best(self.folder, self.step, self.monitor.best, keep=self.config.keep)
        dist.barrier()

    def _essentials(self) -> dict[str, Any]:
        """Return what a resumed run must share; where things are placed may change."""
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
        """Create Adam's state, normally made in the first step, so that a checkpoint can be loaded into it."""
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
        if optimizer:  # copies: a table's codes are also its weight, and loading the weight would round them again
            tensors["optimizer"] = {name: tensor.clone() for name, tensor in state.items()}
        else:
            tensors.pop("tables", None)
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
        restore_run(self, state)
        self._reseed()
        self._resumed_from = self._saved_step = step_of(path)

    def _reseed(self) -> None:
        """Reseed from (seed, rank, step), so that uninterrupted and resumed runs draw the same random numbers."""
        seed_everything(hash((self.config.seed, self.ranks.rank, self.step)) % 2**63)


def _convert(model: nn.Module, plan: Plan | None, recipe: str | None, device: torch.device) -> Conversion | None:
    """Check that all ranks have the same plan or recipe, and apply it to the distributed model."""
    if plan is None and recipe is None:
        return None
    from loka.placing import convert, scale_state

    asked = to_json(plan) if plan is not None else str(recipe).encode()
    Agreement(device=device, name="plan").compare("the plan", asked)
    done = convert(model, plan, recipe=recipe)
    if remembered := sorted(scale_state(model)):
        raise ValueError(
            f"{name_some(remembered)}: delayed scales differ between ranks, so a checkpoint could not be resumed with another number of ranks; "
            "hint: a plan with dynamic scales and without chains"
        )
    return done


def _is_transport(error: RuntimeError) -> bool:
    """Check whether a collective failed, and not the model."""
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out", "processgroup"))


def _call_roll(timeout: float, saved: int | None, error: RuntimeError) -> None:
    """Raise an error that names missing ranks; return if every rank answers."""
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
        problems.append("compilation is not supported yet")
    if how.sharding is not None and config.accumulate > 1:
        problems.append("sharded tables are updated in every backward pass, so batches cannot be accumulated")
    if problems:
        raise ValueError(f"these settings cannot be trained on {world} processes: {'; '.join(problems)}")
