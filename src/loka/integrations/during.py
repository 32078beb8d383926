"""Tune a model in the middle of its training: once, after so many optimizer steps, in place.

    tuning = TuneDuringTraining(batches, after=1000, step=lambda model, batch: model(**batch).loss, out="runs/tuned")
    for batch in loader:
        tuning.begin_step(model)              # before the first forward of an optimizer step; gradient accumulation makes several
        ...                                   # forward, backward, optimizer.step()
        tuning.end_step(model)                # after optimizer.step()

Modules are converted in place and keep their parameters, so optimizers, schedulers, DistributedDataParallel and torch.compile around the model stay valid; compiled code compiles once more,
in whatever mode it was compiled in. It is called between optimizer steps only: gradients that are being accumulated are kept by tune, and no step sees two precisions.

A run that is resumed behind that step places the plan it left in `out` again, and tunes nothing. Guard looks at every converted site from then on.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from loka.lowp import Guard
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.nn.wrapping import unwrap
from loka.placing import convert
from loka.records import Plan
from loka.tuning import Tuned, tune
from loka.units import Example, capture_example

log = logging.getLogger(__name__)
Step = Callable[[nn.Module, Any], Tensor]


class TuneDuringTraining:
    """Tunes once, then guards.

    Args:
        batches: held-out batches, or a function that makes them when they are needed; on the model's device, or moved by `step`.
        after: optimizer steps before it tunes: a model that has learned nothing is judged too early.
        step: step(model, batch) -> loss, one number or one for each example; it neither calls backward nor trains.
        out: folder for plan, record and page; a resumed run reads its plan there.
        part: name of the submodule that is tuned, and that `step` is given: a LightningModule that holds the model; "" is all of it.
        guard: watch converted sites, and put back those that go wrong.
        options: of `loka.tune`: margin, metric, seconds, train, ...

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
            raise ValueError(f"{', '.join(unknown)}: a model that goes on training here is tuned for training here")
        self.after, self.step, self.out, self.part, self.options = after, step, Path(out), part, options
        self.tuned: Tuned | None = None
        self.events: list[Any] = []
        self._batches, self._guards, self._guard = batches, guard, None  # type: Any, bool, Guard | None
        self._done = 0

    @property
    def plan_file(self) -> Path:
        """Where the plan is, once the model was tuned."""
        return self.out / "plan.json"

    def resume(self, model: nn.Module, done: int) -> bool:
        """Start a run that has made steps before; behind `after` the plan is placed again.

        Args:
            model: with its weights loaded, or before: conversion does not change a state_dict.
            done: optimizer steps so far.

        Returns:
            Whether a plan was placed.
        """
        self._done, model = done, self._part_of(model)
        if done < self.after or not self.plan_file.exists() or _is_converted(model):
            return False
        plan = Plan.load(self.plan_file)
        if not plan.units and not plan.mods and not any(site.low_precision_share for site in plan.sites):
            return False
        convert(model, plan, example=self._example(model) if plan.mods else None)
        self._watch(model)
        log.info("loka: placed %s again", self.plan_file)
        return True

    def begin_step(self, model: nn.Module) -> None:
        """Before the first forward of an optimizer step.

        Args:
            model: wrapped or not.
        """
        if self._guard is not None:
            self._guard.begin_step()

    def end_step(self, model: nn.Module) -> Tuned | None:
        """After an optimizer step: tunes when it is time, otherwise lets Guard look.

        Args:
            model: wrapped or not.

        Returns:
            The result in the step it was tuned in; None in all others.
        """
        self._done, model = self._done + 1, self._part_of(model)
        if self._guard is not None:
            for event in self._guard.check():
                self.events.append(event)
                log.warning("loka: %s", event)
        if self._done != self.after or _is_converted(model):
            return None
        modes = {module: module.training for module in model.modules()}
        self.tuned = tune(model, self._make_batches(), step=self.step, out=self.out, **self.options)
        for module, mode in modes.items():
            module.training = mode
        log.info("loka: %s", self.tuned.record.verdict)
        self._watch(model)
        return self.tuned

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
        return capture_example(inner, lambda: self.step(inner, next(iter(self._make_batches()))))

    def _watch(self, model: nn.Module) -> None:
        if self._guards and _is_converted(model):
            self._guard = Guard(model)


def _is_converted(model: nn.Module) -> bool:
    inner = unwrap(model)
    return any(True for _ in linears_of(inner)) or any(True for _ in chains_of(inner))
