"""Tune a model during training: once, after a number of optimizer steps, in place.

    tuning = TuneDuringTraining(batches, after=1000, step=lambda model, batch: model(**batch).loss, out="runs/tuned")
    for batch in loader:
        tuning.begin_step(model)              # before the first forward of an optimizer step
        ...                                   # forward, backward (several with gradient accumulation), optimizer.step()
        tuning.end_step(model)                # after optimizer.step()

Modules are converted in place and keep their parameters, so optimizers, schedulers, DistributedDataParallel and
torch.compile around the model stay valid. Compiled code is recompiled once, in its own mode. Tuning happens only
between optimizer steps: accumulated gradients are kept, and no step mixes two precisions.

A run that is resumed after that step applies the plan in `out` and does not tune again. From then on, Guard watches
every converted site; the sites that it switched are in `out` too. In a group of ranks, rank 0 tunes and all ranks
convert by its plan: what each measured by itself could differ.
"""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from loka.comms import Agreement
from loka.lowp import Guard
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.measure.device import device_of
from loka.nn.wrapping import unwrap
from loka.placing import convert
from loka.records import Plan, from_json, to_json, write_atomically
from loka.tuning import Tuned, tune
from loka.units import Example, capture_example, placed_tables
from loka.units.undisturbed import undisturbed

log = logging.getLogger(__name__)
Step = Callable[[nn.Module, Any], Tensor]
_PATIENCE = 3600.0  # seconds that other ranks wait for rank 0 to tune


class TuneDuringTraining:
    """Tunes a model once during training, then guards it.

    Args:
        batches: held-out batches, or a function that returns them when they are needed; on the model's device, or
            moved there by `step`.
        after: optimizer steps before tuning; a model that has hardly learned anything cannot be judged.
        step: step(model, batch) -> loss, one value or one per example. It must not call backward or an optimizer.
        out: folder for plan, record and report; a resumed run reads its plan there.
        part: name of the submodule to tune and to pass to `step`, for example in a LightningModule; "" for all of it.
        guard: watch converted sites, and revert those that go wrong.
        options: further arguments of `loka.tune`: margin, metric, seconds, train, ...

    Example:
        >>> tuning = TuneDuringTraining(held_out, after=1000, step=step, out="runs/tuned", margin=0.0005)
    """

    def __init__(
        self,
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        after: int,
        step: Step,
        out: str | Path,
        part: str = "",
        guard: bool = True,
        **options: Any,
    ) -> None:
        if after < 1:
            raise ValueError(f"after={after}: expected at least 1 optimizer step, and enough for the model to have learned something")  # fmt: skip
        if unknown := sorted(set(options) & {"target", "estimate_for", "row_factor"}):
            raise ValueError(f"{', '.join(unknown)}: cannot be set here, since the model is tuned to continue training on this device")  # fmt: skip
        self.after, self.step, self.out, self.part, self.options = after, step, Path(out), part, options
        self.tuned: Tuned | None = None
        self.events: list[Any] = []
        self._batches, self._guards, self._guard = batches, guard, None  # type: Any, bool, Guard | None
        self._done, self._settled = 0, False  # settled: tuned, or known not to need it

    @property
    def plan_file(self) -> Path:
        """Path of the plan, which exists once the model has been tuned."""
        return self.out / "plan.json"

    @property
    def guard_file(self) -> Path:
        """Path of Guard's state, which exists once Guard has switched a site."""
        return self.out / "guard.json"

    def resume(self, model: nn.Module, done: int) -> bool:
        """Prepare a run that has already made steps. After `after` steps, apply the saved plan.

        If there is none, for example because the run ended while it was tuning, the model is tuned after the next step.

        Args:
            model: the model, before or after its weights are loaded: conversion does not change a state_dict.
            done: optimizer steps so far.

        Returns:
            True if a plan was applied.
        """
        self._done, model = done, self._part_of(model)
        if done < self.after or self._is_settled(model):
            return False
        if not (text := _agree(model, lambda: _read(self.plan_file))):
            log.warning(
                "loka: there is no %s, although the model is past step %d; it is tuned after the next step",
                self.plan_file,
                self.after,
            )
            return False
        plan, self._settled = from_json(text, Plan, source=str(self.plan_file)), True
        if plan.changes_nothing:
            return False
        self._convert(model, plan)
        self._watch(model)
        if (state := _agree(model, lambda: _read(self.guard_file))) and self._guard is not None:
            self._guard.load_state_dict(json.loads(state))
        log.info("loka: applied %s again", self.plan_file)
        return True

    def begin_step(self, model: nn.Module) -> None:
        """Call before the first forward of an optimizer step, with the model, wrapped or not."""
        if self._guard is not None:
            self._guard.begin_step()

    def end_step(self, model: nn.Module) -> Tuned | None:
        """Call after an optimizer step. Tunes if it is time, otherwise lets Guard check.

        Args:
            model: wrapped or not.

        Returns:
            The result in the step where the model was tuned, on rank 0; None in all others.
        """
        self._done, model = self._done + 1, self._part_of(model)
        if self._guard is not None:
            self._check(self._guard)
        if self._done < self.after or self._is_settled(model):
            return None
        modes = {module: module.training for module in model.modules()}
        plan = from_json(_agree(model, lambda: to_json(self._tune(model).plan)), Plan)
        if self.tuned is None and not plan.changes_nothing:
            self._convert(model, plan)
        for module, mode in modes.items():
            module.training = mode
        self._settled = True
        self._watch(model)
        return self.tuned

    def _tune(self, model: nn.Module) -> Tuned:
        self.guard_file.unlink(missing_ok=True)  # of an earlier run
        self.tuned = tune(model, self._make_batches(), step=self.step, out=self.out, **self.options)
        log.info("loka: %s", self.tuned.record.verdict)
        return self.tuned

    def _convert(self, model: nn.Module, plan: Plan) -> None:
        convert(model, plan, example=self._example(model) if plan.mods else None)

    def _is_settled(self, model: nn.Module) -> bool:
        """Check whether nothing is left to decide. A model that is converted already is only guarded."""
        if not self._settled and _is_converted(model):
            self._settled = True
            self._watch(model)
        return self._settled

    def _check(self, guard: Guard) -> None:
        events = guard.check()
        for event in events:
            self.events.append(event)
            log.warning("loka: %s", event)
        if _leads() and any(event.action in ("switched", "rebound") for event in events):
            write_atomically(self.guard_file, json.dumps(guard.state_dict()).encode())

    def _part_of(self, model: nn.Module) -> nn.Module:
        if not self.part:
            return model
        inner = unwrap(model)
        try:
            return inner.get_submodule(self.part)
        except AttributeError as error:
            children = ", ".join(name for name, _ in inner.named_children())
            raise ValueError(
                f"part={self.part!r}: {type(inner).__name__} has no such submodule; it has {children}"
            ) from error

    def _make_batches(self) -> Iterable[Any]:
        made: Iterable[Any] = self._batches() if callable(self._batches) else self._batches
        return made

    def _example(self, model: nn.Module) -> Example:
        inner = unwrap(model)
        with undisturbed(inner):
            inner.eval()
            return capture_example(inner, lambda: self.step(inner, next(iter(self._make_batches()))))

    def _watch(self, model: nn.Module) -> None:
        if self._guards and _has_low_linears(model):
            self._guard = Guard(model)


def _is_converted(model: nn.Module) -> bool:
    return _has_low_linears(model) or bool(placed_tables(unwrap(model)))


def _has_low_linears(model: nn.Module) -> bool:
    inner = unwrap(model)
    return any(True for _ in linears_of(inner)) or any(True for _ in chains_of(inner))


def _is_grouped() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _leads() -> bool:
    """Check whether this is rank 0, or the only process."""
    return not _is_grouped() or dist.get_rank() == 0


def _agree(model: nn.Module, decide: Callable[[], bytes]) -> bytes:
    """Return what rank 0 decides, on every rank."""
    if not _is_grouped():
        return decide()
    return Agreement(timeout=_PATIENCE, device=device_of(unwrap(model)), name="tuning").decide(decide)


def _read(path: Path) -> bytes:
    """Return the content of a file; nothing if it does not exist."""
    return path.read_bytes() if path.exists() else b""
