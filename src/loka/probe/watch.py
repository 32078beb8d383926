"""Watch: observes one site and records the operands of its GEMMs on sampled steps.

A look is one call of the module on a sampled step. The forward copies up to `rows` rows of x, one from each of as many
equal parts of the batch; the backward copies the same rows of dy. They are processed only after the step (`absorb`), so
that the step itself only gathers. Rows are drawn from a generator seeded by the site and the number of the look: a
probe does not touch the global random state, and resumes after a crash as if it had not been interrupted.

    a module never called              nothing is recorded
    calls under no_grad                recorded (x and W only) until the first step with gradients, then ignored so that
                                       validation between training steps has no effect
    a module called twice in a step    two looks, each with its own x and dy
    activation checkpointing           recomputation is detected (autograd is running) and not counted again. With
                                       reentrant checkpoints, whose first forward runs without gradients, the
                                       recomputation is the look
    empty batches                      counted as calls with no rows
    non-finite values                  counted; their rows are excluded from the covariance
    a link of an FP8 chain             its rows come from a trace of the chain (`loka.probe.chain_tap`), with the
                                       operands that the chain itself multiplied

Weights change slowly: their statistics are updated on every tenth sampled step, the matrix normal only at snapshots.
`loka.probe.weights` explains how they are read. The first two looks, then one in four, are scored (`loka.probe.tally`).

An observer must not raise into a training loop: any error disables the site, with the reason in `off` and in the
report.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from loka.formats import QTensor, left_in_sum
from loka.probe.adapter import Adapter
from loka.probe.learned import Learned
from loka.probe.ledger import Ledger
from loka.probe.look import Look
from loka.probe.own import OwnTally
from loka.probe.reservoir import Reservoir
from loka.probe.rows import choose_clusters, choose_rows, take_example, take_rows
from loka.probe.saving import select_prefix
from loka.probe.score import SCORED
from loka.probe.seeing import NO_TICKET, enroll, inside_backward
from loka.probe.tally import Tally
from loka.probe.weights import is_sharded, read_weight, shape_of_weight, why_kept
from loka.records import GEMMS, Gemm, Role, Source, TensorStats
from loka.records.prose import spell_error

WEIGHT_EVERY = 10
SCORED_KINDS = ("linear", "mixed")
MAX_UNGRADED = 8  # calls without gradients kept per step
UNKNOWN_LOSS = "the loss is not known: it is not a cross-entropy of the model's output; hint: probe.step(loss)"
LossOf = Callable[[int], tuple[Tensor, Tensor] | None]


class Watch:
    """Observes one site of a model."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapter: Adapter,
        *,
        rows: int,
        seed: int,
        ledger: Ledger,
        window: int,
        recipes: Iterable[str] = SCORED,
    ) -> None:
        self.name, self.module, self.adapter = name, module, adapter
        self.type = type(module).__name__
        self.on = True  # whether the site is due on this step; read when an op runs, never while a graph is traced
        self._rows, self._seed, self._ledger, self._window = rows, seed, ledger, window
        self.calls = self.rows_seen = self.largest = self.steps = 0
        self.needs_dgrad = False
        self.forward_only = False  # every call so far ran without gradients
        self.off: str | None = None  # why the site was disabled
        self.kept = why_kept(module)
        self.unscored: str | None = None  # why the last look due for scoring was not scored
        self.learned: Learned | None = None
        self.tally = Tally(recipes)
        self.own = OwnTally()  # measurements as a link of a chain
        self._pending: dict[int, Look] = {}
        self._ungraded: list[Look] = []
        self._whole: Tensor | None = None  # a sharded site's unsharded weight, as of its last look
        self._shape = (0, 0)
        self._outside = 0  # calls of this step outside backward, i.e. not recomputations
        self.number = enroll(self)
        parameter = next(module.parameters(), None)
        self.token = torch.zeros(1, dtype=torch.int32, device=None if parameter is None else parameter.device)
        self.grad_token = self.token.clone()
        self.sharded = is_sharded(parameter)
        shape = shape_of_weight(module, adapter.weight)
        if shape is not None:
            self._prepare(shape[-1], shape[-2], self.token.device)

    @property
    def weight(self) -> Tensor | None:
        """The weight, [N, K] or [experts, N, K]; None if both operands are activations or if it must not be read."""
        return self._whole if self.sharded else read_weight(self.module, self.adapter.weight)

    @property
    def k(self) -> int:
        """Length of the contracted dimension; for a lookup, the number of table rows."""
        return self._shape[0]

    @property
    def n(self) -> int:
        """Number of output columns."""
        return self._shape[1]

    @property
    def groups(self) -> int:
        """Number of experts of a grouped GEMM, else 1."""
        weight = self.weight
        return weight.shape[0] if weight is not None and weight.dim() == 3 else 1

    @property
    def device(self) -> torch.device:
        """The device of the site."""
        return self.token.device if self.learned is None else self.learned.device

    @property
    def reservoir(self) -> Reservoir:
        """The rows kept of this site; empty if it was never called."""
        if self.learned is None:
            return Reservoir(1, (1, 1), self.device, torch.Generator())
        return self.learned.reservoir

    def _prepare(self, k: int, n: int, device: torch.device) -> None:
        lookup = self.adapter.kind == "lookup"
        self._shape = (n, k) if lookup else (k, n)
        widths = (k, k) if lookup else (k, n)
        self._share = self._ledger.reserve(self.name, *widths, not lookup)
        self.learned = self._make_learned(widths, device)

    def _make_learned(self, widths: tuple[int, int], device: torch.device) -> Learned:
        weight = self.adapter.kind != "lookup"
        return Learned(self.name, widths, device, self._seed, self._share, weight=weight, window=self._window)

    @property
    def gemms(self) -> list[Gemm]:
        """The GEMMs that were observed."""
        if self.learned is None or not self.calls or self.adapter.kind == "lookup" or not self._readable:
            return []
        absent = set() if self.learned.reservoir.has_dy else {"dgrad", "wgrad"}
        if not self.needs_dgrad:
            absent.add("dgrad")
        weight = next(self.module.parameters(), None) if self.adapter.weight is not None else None
        if weight is not None and not weight.requires_grad:
            absent.add("wgrad")
        return [gemm for gemm in GEMMS if gemm not in absent]

    @property
    def is_raw(self) -> bool:
        """Whether the input comes straight from the data, with no trained layer before it."""
        return not self.needs_dgrad and self.adapter.kind in SCORED_KINDS

    @property
    def _readable(self) -> bool:
        return self.adapter.weight is None or self.weight is not None

    def switch_off(self, doing: str, error: BaseException) -> None:
        """Disable the site and record why."""
        self.off = f"switched off while {doing}: {spell_error(error)}"
        self.on, self._pending, self._ungraded = False, {}, []

    def see_forward(
        self,
        x: Tensor,
        right: Tensor | None,
        needs_dgrad: bool,
        dtype: torch.dtype | None = None,
        *,
        weight: Tensor | None = None,
        graded: bool = True,
        call: int = 0,
    ) -> int:
        """Record the operands of one call; returns the ticket to pass to `see_backward` with the gradient.

        `dtype` is the dtype the GEMM casts x to, `weight` the unsharded weight of a sharded site, `graded` whether
        gradients are recorded, and `call` the number of the model call within this step.
        """
        if not self.on or self.off is not None:
            return NO_TICKET
        x = x.detach()
        try:
            with torch.no_grad():
                if weight is not None:
                    self._whole = weight.detach().clone()
                if not graded and not inside_backward():
                    if self._counts_ungraded:
                        ticket = self.calls + len(self._ungraded)
                        self._ungraded.append(self._take(x, right, dtype, ticket, 0))
                    return NO_TICKET
                if inside_backward() and self._outside:
                    return self._find_recomputed(x)
                self._begin_graded()
                return self._keep_pending(self._take(x, right, dtype, self.calls, call), needs_dgrad)
        except Exception as error:
            self.switch_off("looking at a forward pass", error)
            return NO_TICKET

    def see_look(self, look: Look, needs_dgrad: bool, *, weight: Tensor | None = None, graded: bool = True) -> int:
        """Record one call of a link of a chain, whose rows were taken by the tap. Not called for recomputations."""
        if not self.on or self.off is not None:
            return NO_TICKET
        try:
            with torch.no_grad():
                if weight is not None:
                    self._whole = weight.detach().clone()
                look.weight = self._weight_to_score()
                if graded:
                    self._begin_graded()
                    return self._keep_pending(look, needs_dgrad)
                if self._counts_ungraded:
                    self._ungraded.append(look)
        except Exception as error:
            self.switch_off("looking at a link of a chain", error)
        return NO_TICKET

    @property
    def _counts_ungraded(self) -> bool:
        """Whether a call without gradients is kept: only until some step has gradients."""
        return (self.forward_only or not self.calls) and len(self._ungraded) < MAX_UNGRADED

    def _begin_graded(self) -> None:
        if not inside_backward():
            self._outside += 1
        if self.forward_only:
            self._discard_ungraded()

    def _keep_pending(self, look: Look, needs_dgrad: bool) -> int:
        """Keep a look until its gradient arrives; returns its ticket."""
        ticket = self.calls
        self._count_call(look)
        self.needs_dgrad |= needs_dgrad
        if look.count == 0:
            return NO_TICKET
        self._pending[ticket] = look
        return ticket

    def _weight_to_score(self) -> Tensor | None:
        """Return a copy of the current weight if this look will be scored, else None."""
        weight = self.weight if self.adapter.kind in SCORED_KINDS and self.tally.due(self.steps) else None
        return weight.detach().clone() if weight is not None and weight.dim() == 2 else None

    def _take(self, x: Tensor, right: Tensor | None, dtype: torch.dtype | None, ticket: int, call: int) -> Look:
        """Copy some rows of a call."""
        if is_sharded(x):
            x = x.to_local()  # type: ignore[attr-defined]
        if self.learned is None:
            self._prepare(x.shape[-1], self._columns(right), x.device)
        count = x.numel() // max(x.shape[self.adapter.channel], 1)
        examples = x.shape[0] if x.dim() > 2 and x.shape[0] else count
        generator = self._generator(ticket)
        index, together = choose_clusters(examples, count // max(examples, 1), self._rows, generator)
        rows = take_rows(x, self.adapter.channel, index) if count else x.reshape(0, x.shape[self.adapter.channel])
        example = None if right is None or not count else take_example(right.detach(), generator)
        largest = {"x": torch.linalg.vector_norm(x, torch.inf).float()} if count else {}
        rows = rows if dtype is None else rows.to(dtype)
        return Look(rows, index, example, count, examples, together, call, largest, self._weight_to_score())

    def _columns(self, right: Tensor | None) -> int:
        if right is not None:
            return int(right.shape[-2])
        shape = shape_of_weight(self.module, self.adapter.weight)
        if shape is None:
            raise ValueError("the weight has no shape although the module has run")
        return int(shape[-2])

    def _count_call(self, look: Look) -> None:
        self.calls += 1
        self.rows_seen += look.count
        self.largest = max(self.largest, look.count)

    def _discard_ungraded(self) -> None:
        """Discard what was recorded without gradients, because training has begun."""
        self.forward_only = False
        self.calls = self.rows_seen = self.largest = self.steps = 0
        if self.learned is not None:
            self.learned = self._make_learned(self.learned.widths, self.device)

    def _find_recomputed(self, x: Tensor) -> int:
        """Return the ticket of a recomputed call: of several pending looks, the one with the same rows.

        This comparison is the only place where a look synchronizes with the device.
        """
        waiting = [ticket for ticket, look in self._pending.items() if look.dy is None]
        if len(waiting) < 2:
            return waiting[0] if waiting else NO_TICKET

        def distance(ticket: int) -> float:
            look = self._pending[ticket]
            rows = take_rows(x, self.adapter.channel, look.index)
            return float((rows - look.x).abs().nan_to_num().max()) if rows.shape == look.x.shape else float("inf")

        return min(waiting, key=distance)

    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """Record the gradient of a call's output. A second gradient for the same call is ignored."""
        look = self._pending.get(ticket)
        if look is None or look.dy is not None:
            return
        try:
            with torch.no_grad():
                dy = dy.detach().to_local() if is_sharded(dy) else dy.detach()  # type: ignore[attr-defined]
                look.dy = take_rows(dy, self.adapter.channel, look.index)
                look.largest["dy"] = torch.linalg.vector_norm(dy, torch.inf).float()
                look.left = left_in_sum(dy.movedim(self.adapter.channel, -1))
        except Exception as error:
            self.switch_off("looking at a backward pass", error)

    def see_link_gradient(self, ticket: int, dy: Tensor, low: QTensor, largest: Tensor, left: Tensor) -> None:
        """Record the gradient of a link's product for the rows of its look, before rounding and as the GEMMs had it."""
        look = self._pending.get(ticket)
        if look is not None and look.dy is None and look.own is not None:
            look.dy, look.own.dy, look.largest["dy"], look.left = dy, low, largest, left

    def _generator(self, look: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + look) % 2**63)

    def absorb(self, step: int, loss_of: LossOf | None = None) -> bool:
        """Process the looks of the finished step. Returns whether there were any."""
        try:
            with torch.no_grad():
                return self._absorb(step, loss_of)
        except Exception as error:
            self.switch_off("learning from a step", error)
            return False

    def _absorb(self, step: int, loss_of: LossOf | None) -> bool:
        looks, self._pending, called = self._pending, {}, self._outside or self._pending
        ungraded, self._ungraded, self._outside = self._ungraded, [], 0
        if not called and ungraded:
            looks = {self.calls + number: look for number, look in enumerate(ungraded)}
            self.forward_only = called = True
            for look in ungraded:
                self._count_call(look)
        if not called or self.learned is None:
            return bool(called)
        if self.steps % WEIGHT_EVERY == 0 and (weight := self.weight) is not None:
            self.learned.see_weight(self._sample_weight(weight), step)
        due = self.tally.due(self.steps)
        self.steps += 1
        if due:
            _weigh_calls(look for look in looks.values() if look.dy is not None)
        for ticket, look in looks.items():
            if look.count == 0:
                continue
            self.learned.see(look.x, look.dy, look.right, step, self._generator(-1 - ticket))
            if due:
                self._score(look, step, loss_of)
                self._measure_own(look, step, loss_of)
            self.tally.remember(look.largest)
        return True

    def _measure_own(self, look: Look, step: int, loss_of: LossOf | None) -> None:
        """Measure the error of a link of a chain in this call, as it actually ran."""
        if look.own is None or look.weight is None:
            return
        try:
            loss = None if loss_of is None else loss_of(look.call)
            self.own.see(look, look.weight, loss, step)
        except Exception as error:
            self.unscored = f"the chain's own way was not measured: {spell_error(error)}"

    def _score(self, look: Look, step: int, loss_of: LossOf | None) -> None:
        """Score what every recipe would have done to the loss in this call."""
        try:
            if look.weight is None:
                self.unscored = f"sites of the kind {self.adapter.kind!r} have no score"
            elif look.dy is None:
                self.unscored = "no gradient was seen"
            elif loss_of is None or (loss := loss_of(look.call)) is None:
                self.unscored = UNKNOWN_LOSS
            else:
                self.tally.see(look.show(look.weight, loss, self.tally.largest), step)
        except Exception as error:  # the site's other data remains valid
            self.unscored = f"scoring failed: {spell_error(error)}"

    def _sample_weight(self, weight: Tensor) -> Tensor:
        """Return the whole weight of a GEMM, or some rows of an embedding table, which may be huge."""
        flat = weight.detach().reshape(-1, weight.shape[-1])
        if self.adapter.kind != "lookup":
            return flat
        return take_rows(flat, -1, choose_rows(flat.shape[0], self._rows, self._generator(self.calls)))

    @torch.no_grad()
    def snapshot(self) -> None:
        """Add the current weight to the matrix normal."""
        if self.learned is not None and self.adapter.kind != "lookup":
            self.learned.snapshot(self.weight)

    def release(self) -> None:
        """Free the cached covariance factors, which are as large as the covariances. They are recomputed on demand."""
        if self.learned is not None:
            self.learned.release()

    def describe(self) -> list[TensorStats]:
        """Return the statistics of all operands that were observed."""
        return [] if self.learned is None else self.learned.describe()

    @property
    def covariance_kind(self) -> str:
        """How the covariances of x and dy and the matrix normal of W are stored, for the report."""
        return "nothing seen" if self.learned is None else self.learned.kind

    def draw(self, role: Role, source: Source, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` rows of x [count, K] or dy [count, N], or a weight [N, K]; float32. See `loka.probe.learned`."""
        return self._require_learned().draw(role, source, count, generator, self.weight)

    def draw_pair(self, source: Source, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw x and dy; with source "rows" they belong to the same examples."""
        return self._require_learned().draw_pair(source, count, generator)

    def at(self, time: Literal["first", "latest"]) -> "Watch":
        """Return the site as of its first or latest complete window, for reading only."""
        learned = self._require_learned()
        rows = learned.windows.first if time == "first" else learned.windows.latest
        if rows.kept == 0:
            raise ValueError(f"{self.name}: no window of training is complete yet")
        then = copy.copy(self)
        then.learned = self._make_learned(learned.widths, self.device)
        then.learned.recall(rows, learned, self._generator(0))
        # the score covers all looks, so a single window is judged by its errors
        then.tally, then.own = Tally(self.tally.recipes), OwnTally()
        then.on = False
        return then

    def _require_learned(self) -> Learned:
        if self.learned is None:
            raise ValueError(f"{self.name}: never called on a sampled step, so there is nothing to draw from")
        return self.learned

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as flat named tensors."""
        counts = [self.calls, self.rows_seen, self.largest, int(self.needs_dgrad), self.steps, *self._shape]
        state = {} if self.learned is None else self.learned.state_dict()
        state |= {f"score.{key}": value for key, value in self.tally.state_dict().items()}
        state |= {f"own.{key}": value for key, value in self.own.state_dict().items()}
        if self._whole is not None:
            state["whole"] = self._whole.cpu().clone()
        return {**state, "counts": torch.tensor(counts), "forward_only": torch.tensor(self.forward_only)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        self.calls, self.rows_seen, self.largest, dgrad, self.steps, k, n = state["counts"].tolist()
        self.needs_dgrad, self.forward_only = bool(dgrad), bool(state["forward_only"])
        if "whole" in state:
            self._whole = state["whole"].to(self.device, copy=True)
        self.tally.load_state_dict(select_prefix(state, "score."), self.device)
        self.own.load_state_dict(select_prefix(state, "own."))
        if (k, n) == (0, 0):
            return
        if self.learned is None:
            self._prepare(k, n, self.device)
        self._require_learned().load_state_dict(state)

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add the `state_dict` of the same site on another rank. What was seen without gradients gives way to training."""
        calls, rows_seen, largest, dgrad, steps, k, n = state["counts"].tolist()
        if not calls:
            return
        forward_only = bool(state["forward_only"])
        if forward_only and self.calls and not self.forward_only:
            return
        if self.forward_only and not forward_only:
            self._discard_ungraded()
        self.forward_only = forward_only
        if (k, n) != (0, 0):
            if self.learned is None:
                self._prepare(k, n, self.device)
            mine = self._require_learned()
            other = self._make_learned(mine.widths, torch.device("cpu"))
            other.load_state_dict(state)
            mine.merge(other, self._generator(self.calls + calls))
        theirs = Tally(self.tally.recipes)
        theirs.load_state_dict(select_prefix(state, "score."), self.device)
        self.tally.merge(theirs)
        chained = OwnTally()
        chained.load_state_dict(select_prefix(state, "own."))
        self.own.merge(chained)
        self.calls, self.rows_seen = self.calls + calls, self.rows_seen + rows_seen
        self.largest, self.steps = max(self.largest, largest), max(self.steps, steps)
        self.needs_dgrad |= bool(dgrad)


def _weigh_calls(looks: Iterable[Look]) -> None:
    """Give all calls of a linear within one model call the same total weight, however many rows of each are scored.

    `looks` must have gradients: calls that the loss does not depend on do not count.
    """
    together: defaultdict[int, list[tuple[Look, int]]] = defaultdict(list)
    for look in looks:
        together[look.call].append((look, look.rows_to_score().numel() // look.together))
    for calls in together.values():
        mean = sum(rows for _, rows in calls) / len(calls)
        for look, rows in calls:
            look.calls, look.weighs = len(calls), mean / max(rows, 1)
