"""Observe a model: its units, the magnitudes for their scales, and what each way of running a linear does to the loss.

A few batches run forward and backward in high precision with hooks. Nothing is trained, and gradients are discarded.
Each call of a linear keeps some rows for a moment: the input x, the gradient dy of the output, and the weight. From
these `loka.probe.score` predicts the relative change of the loss for every recipe and GEMM.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loka.dispatch.choosing import Looked, SiteLook
from loka.formats import left_in_sum
from loka.lowp.linear import refuse
from loka.nn.jagged import dense
from loka.nn.wrapping import named_sites
from loka.probe.adapter import find_adapter
from loka.probe.offset import find_offsets
from loka.probe.score import SCORED, Shown, harm_from, score_look
from loka.probe.unseen import find_unseen
from loka.records import Gemm
from loka.records.prose import name_some
from loka.tuning.task import Task
from loka.units import discover, measuring
from loka.units.undisturbed import gradients_aside, train_recurrent, undisturbed

__all__ = ["Looked", "SiteLook", "describe_unseen_products", "look"]

ROWS = 1024  # rows of a call to score
Progress = Callable[[str, int, int], None]


def look(task: Task, *, training: bool, batches: int = 8, progress: Progress | None = None) -> Looked:
    """Run a few batches with hooks.

    Args:
        task: the model and how to run it.
        training: find units for training; otherwise for serving. Gradients are computed in both cases: the score needs
            them.
        batches: number of batches to run at most.
        progress: called after every batch.

    Returns:
        The units with magnitudes, and for every linear what each recipe would do to the loss.

    Raises:
        ValueError: the loss of a batch is not finite.
    """
    model, chosen = task.model, task.looking[:batches]
    found = discover(model, task.steps(), serving=not training, linears=1)
    linears = [(n, module) for n, module in named_sites(model, once=True) if isinstance(module, nn.Linear)]
    observers = {name: _Observer(name, module, len(found.rows.get(name, [1]))) for name, module in linears}
    total = 0.0
    with ExitStack() as stack:
        stack.enter_context(_differentiable(model))
        seen = stack.enter_context(measuring(model, found.units))
        for observer in observers.values():
            stack.callback(observer.module.register_forward_hook(observer.see, with_kwargs=True).remove)
        for index, batch in enumerate(chosen):
            with torch.enable_grad():
                loss = task.mean_loss(model, batch)
                # from here on: a step may take other gradients in its forward, for a penalty
                for observer in observers.values():
                    observer.armed = True
                loss.backward()  # type: ignore[no-untyped-call]
            value = loss.detach()
            if not bool(value.isfinite()):
                raise ValueError(
                    f"the loss of batch {index} is {float(value)}: expected a finite number; hint: leave that batch out"
                )
            for observer in observers.values():
                observer.judge(value)
            total += float(value) / len(chosen)
            model.zero_grad(set_to_none=True)
            if progress is not None:
                progress("look", index + 1, len(chosen))
    units = seen.units()
    return Looked(
        {name: observer.finish(total, len(chosen)) for name, observer in observers.items()},
        units,
        found.alone,
        total,
        found.by_themselves,
    )


def describe_unseen_products(model: nn.Module) -> list[str]:
    """Describe matrix products that are not an nn.Linear: they stay in 16-bit, and FLOPs shares do not count them.

    Returns one note per reason, with the names of the modules.
    """
    linears = {id(module) for _, module in named_sites(model) if isinstance(module, nn.Linear)}
    reasons: dict[str, list[str]] = {}
    for found in find_unseen(model, linears, ()):
        reasons.setdefault(found.reason, []).append(found.name or "the model itself")
    for name, module in named_sites(model):
        adapter = None if id(module) in linears else find_adapter(module)
        if adapter is not None and adapter.kind != "lookup":
            kind = type(module).__name__
            hint = "; hint: replace it by an nn.Linear with the transposed weight" if kind == "Conv1D" else ""
            reasons.setdefault(f"a {kind} is not converted here{hint}", []).append(name)
    return [
        f"not observed, and not counted in the FLOPs of these units: {name_some(names, 4)}: {why}"
        for why, names in reasons.items()
    ]


class _Rows(NamedTuple):
    """Some rows of one call, and statistics over all of its rows."""

    x: Tensor
    dy: Tensor
    total: int  # number of all rows
    largest: Tensor  # amax of dy over all rows
    left: Tensor  # `left_in_sum` of dy over all rows


class _Observer:
    """Observes one linear with hooks and scores what it sees."""

    def __init__(self, name: str, module: nn.Linear, calls: int) -> None:
        self.name, self.module = name, module
        self.look = SiteLook(name, module.in_features, module.out_features, calls=calls, refusal=refuse(module))
        self._rows: list[_Rows] = []
        self._is_raw = True  # the input is data and not an activation; only offsets in data are worth an alarm
        self.armed = False  # whether the loss is being differentiated
        self._counted = 0  # rows of all batches
        self._sums: dict[tuple[Gemm, str], list[Tensor]] = {}
        device = next(module.parameters()).device  # not `module.weight`: a parametrization may change when it is read
        self._largest = {role: torch.zeros((), device=device) for role in ("x", "dy")}
        self._kept: list[Tensor] = []

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        given = args[0] if args else kwargs["input"]
        self._is_raw &= not given.requires_grad
        x = dense(given.detach()).reshape(-1, self.look.k)
        self.look.rows = max(self.look.rows, x.shape[0])
        if not self.armed:  # activation checkpointing calls it again in backward
            self._counted += x.shape[0]
        if not output.requires_grad or x.shape[0] == 0 or self.look.refusal:
            return
        every = max(x.shape[0] // ROWS, 1)
        # copies: views would keep all rows of all linears in memory until the batch is judged
        rows = x[::every].clone()
        width, count = self.look.n, x.shape[0]

        def keep(g: Tensor) -> None:
            if self.armed:
                dy = dense(g.detach()).reshape(-1, width)
                self._rows.append(_Rows(rows, dy[::every].clone(), count, dy.abs().amax().float(), left_in_sum(dy)))

        output.register_hook(keep)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def judge(self, loss: Tensor) -> None:
        """Score the rows of this batch, then discard them."""
        calls = len(self._rows)  # the effects of several calls on the loss add up
        taken = sum(len(rows.x) for rows in self._rows) / max(calls, 1)
        for x, dy, count, largest_dy, left in self._rows:
            largest = {"x": x.abs().amax().float(), "dy": largest_dy}
            before = {role: torch.maximum(self._largest[role], largest[role]) for role in largest}
            weight = self.module.weight.detach()
            shown = Shown(
                x,
                dy,
                weight,
                loss,
                loss,
                count * calls,
                largest=largest,
                before=before,
                left=left,
                weighs=taken / len(x),
            )
            for key, sums in score_look(shown, SCORED).items():
                self._sums.setdefault(key, []).append(sums)
            self._largest = before
            if self._is_raw and len(self._kept) < 4:
                self._kept.append(x[:256].float().cpu())
        self._rows.clear()
        self.armed = False

    def finish(self, loss: float, batches: int) -> SiteLook:
        self.look.step_rows = self._counted / batches
        for (gemm, recipe), sums in self._sums.items():
            made = harm_from(gemm, torch.stack(sums).double().cpu(), nats=min(max(loss, 0.0), 10.0))
            if made is not None:
                self.look.harm[gemm, recipe] = made[0]
        if self._kept:
            self.look.alarms = find_offsets(torch.cat(self._kept))
        return self.look


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Require gradients of every parameter in the block, then restore the model, its gradients and the random state."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    with undisturbed(model), gradients_aside(model):
        try:
            train_recurrent(model)
            for p, _ in before:
                if p.is_floating_point():
                    p.requires_grad_(True)
            yield
        finally:
            for p, needed in before:
                p.requires_grad_(needed)
