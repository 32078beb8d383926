"""Watching one site: what its GEMMs are given on sampled steps.

A look is one call of the module on a sampled step. The forward takes up to `rows` rows of x, one from each of as many equal parts of the batch; the
backward takes the same rows of dy; both are copies. Nothing is computed from them until the step is over (`absorb`), so that the step itself only
gathers. Rows are drawn from a generator seeded by the site and the number of the look: a probe changes no random state, and continues after
a crash as if there had been none.

    a module never called                                 nothing is recorded
    calls under no_grad                                   recorded, x and W alone, until a step with gradients was seen: then only those count, since
                                                          a validation between training steps must leave no trace
    a module called twice in a step                       two looks, each x with its own dy
    recomputation by activation checkpointing             recognised (autograd is running) and not counted again; with reentrant checkpoints,
                                                          whose first forward runs without gradients, the recomputation is the look
    empty batches                                         counted as calls of no rows
    non-finite values                                     counted; their rows stay out of the covariance
    a link of an FP8 chain                                its rows come from a trace of the chain (`loka.probe.chain_tap`), with what the chain itself multiplied

Weights change slowly: their statistics are taken at every tenth step with a look, the matrix normal only at snapshots. How they are read is a matter of its own
(`loka.probe.weights`). The first two looks and then one in four are scored: what every recipe would do to the loss (`loka.probe.tally`).

An observer must not raise into a training loop: whatever goes wrong switches the site off, with the reason in `off` and in the report.
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
from loka.probe.score import SCORED
from loka.probe.seeing import NO_TICKET, enroll, inside_backward
from loka.probe.source import Source
from loka.probe.tally import Tally
from loka.probe.weights import is_sharded, read_weight, shape_of_weight, why_kept
from loka.records import GEMMS, Gemm, Role, TensorStats

WEIGHT_EVERY = 10
SCORED_KINDS = ("linear", "mixed")
MAX_UNGRADED = 8  # calls of one step without gradients
UNKNOWN_LOSS = "the loss is not known: it is no cross-entropy of what the model returned; hint: probe.step(loss)"
LossOf = Callable[[int], tuple[Tensor, Tensor] | None]


class Watch:
    """One site of a model."""

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
        self.on = True  # whether it is this site's turn; read when an op runs, never when a graph is made
        self._rows, self._seed, self._ledger, self._window = rows, seed, ledger, window
        self.calls = self.rows_seen = self.largest = self.steps = 0
        self.needs_dgrad = False
        self.forward_only = False  # all that was seen so far ran without gradients
        self.off: str | None = None  # why it is not looked at any more
        self.kept = why_kept(module)
        self.unscored: str | None = None  # why the last look that could have been scored was not
        self.learned: Learned | None = None
        self.tally = Tally(recipes)
        self.own = OwnTally()  # as a link of a chain, where it is one
        self._pending: dict[int, Look] = {}
        self._ungraded: list[Look] = []
        self._whole: Tensor | None = None  # the last weight of a sharded site
        self._shape = (0, 0)
        self._outside = 0  # calls of this step that were no recomputation
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
        """The parameter, [N, K] or [experts, N, K]; None where both operands are activations, or where it must not be read."""
        return self._whole if self.sharded else read_weight(self.module, self.adapter.weight)

    @property
    def k(self) -> int:
        """Length of the contracted dimension; of a lookup, rows of the table."""
        return self._shape[0]

    @property
    def n(self) -> int:
        """Columns of the output."""
        return self._shape[1]

    @property
    def groups(self) -> int:
        """Matrices that share the rows: experts of a grouped GEMM, else 1."""
        weight = self.weight
        return weight.shape[0] if weight is not None and weight.dim() == 3 else 1

    @property
    def device(self) -> torch.device:
        """Where the site computes."""
        return self.token.device if self.learned is None else self.learned.device

    @property
    def reservoir(self) -> Reservoir:
        """Its kept rows; of a site never seen, none."""
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
        """The GEMMs that happened."""
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
        """Whether its input comes from the data: nothing before it is trained."""
        return not self.needs_dgrad and self.adapter.kind in SCORED_KINDS

    @property
    def _readable(self) -> bool:
        return self.adapter.weight is None or self.weight is not None

    def switch_off(self, doing: str, error: BaseException) -> None:
        """Look no more, and remember why."""
        self.off = f"switched off while {doing}: {_spell(error)}"
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
        """One call: its operands. Returns the ticket to bring with the gradient; `dtype` is what the GEMM casts x to.

        `weight` is given where it is whole only now, `graded` says whether gradients are recorded, `call` which call of the model this is.
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
                    return self._recall(x)
                self._begin_graded()
                return self._file(self._take(x, right, dtype, self.calls, call), needs_dgrad)
        except Exception as error:
            self.switch_off("looking at a forward pass", error)
            return NO_TICKET

    def see_look(self, look: Look, needs_dgrad: bool, *, weight: Tensor | None = None, graded: bool = True) -> int:
        """One call whose rows somebody else took: of a link of a chain. The rest as `see_forward`; a recomputation is not brought here."""
        if not self.on or self.off is not None:
            return NO_TICKET
        try:
            with torch.no_grad():
                if weight is not None:
                    self._whole = weight.detach().clone()
                look.weight = self._weight_to_score()
                if graded:
                    self._begin_graded()
                    return self._file(look, needs_dgrad)
                if self._counts_ungraded:
                    self._ungraded.append(look)
        except Exception as error:
            self.switch_off("looking at a link of a chain", error)
        return NO_TICKET

    @property
    def _counts_ungraded(self) -> bool:
        """Calls without gradients are kept until the step is over, and only while no step has had any."""
        return (self.forward_only or not self.calls) and len(self._ungraded) < MAX_UNGRADED

    def _begin_graded(self) -> None:
        if not inside_backward():
            self._outside += 1
        if self.forward_only:
            self._forget()

    def _file(self, look: Look, needs_dgrad: bool) -> int:
        """Keep a look until its gradient comes; returns its ticket."""
        ticket = self.calls
        self._count(look)
        self.needs_dgrad |= needs_dgrad
        if look.count == 0:
            return NO_TICKET
        self._pending[ticket] = look
        return ticket

    def _weight_to_score(self) -> Tensor | None:
        """A copy of the weight as it is in this call, where the look will be scored."""
        weight = self.weight if self.adapter.kind in SCORED_KINDS and self.tally.due(self.steps) else None
        return weight.detach().clone() if weight is not None and weight.dim() == 2 else None

    def _take(self, x: Tensor, right: Tensor | None, dtype: torch.dtype | None, ticket: int, call: int) -> Look:
        """Copies of some rows of a call."""
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

    def _count(self, look: Look) -> None:
        self.calls += 1
        self.rows_seen += look.count
        self.largest = max(self.largest, look.count)

    def _forget(self) -> None:
        """Training has begun: what ran without gradients before it does not count."""
        self.forward_only = False
        self.calls = self.rows_seen = self.largest = self.steps = 0
        if self.learned is not None:
            self.learned = self._make_learned(self.learned.widths, self.device)

    def _recall(self, x: Tensor) -> int:
        """The ticket of a recomputed call. Of several that wait for a gradient it is the one with the same rows: the only time a look waits for the device."""
        waiting = [ticket for ticket, look in self._pending.items() if look.dy is None]
        if len(waiting) < 2:
            return waiting[0] if waiting else NO_TICKET

        def distance(ticket: int) -> float:
            look = self._pending[ticket]
            rows = take_rows(x, self.adapter.channel, look.index)
            return float((rows - look.x).abs().nan_to_num().max()) if rows.shape == look.x.shape else float("inf")

        return min(waiting, key=distance)

    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """The gradient of a call's output; a second one for the same call is not counted."""
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
        """The gradient of a link's product, of the rows of its look: before it was rounded, and as the GEMMs had it."""
        look = self._pending.get(ticket)
        if look is not None and look.dy is None and look.own is not None:
            look.dy, look.own.dy, look.largest["dy"], look.left = dy, low, largest, left

    def _generator(self, look: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + look) % 2**63)

    def absorb(self, step: int, loss_of: LossOf | None = None) -> bool:
        """The step is over: learn from what it showed. Returns whether it showed anything."""
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
                self._count(look)
        if not called or self.learned is None:
            return bool(called)
        if self.steps % WEIGHT_EVERY == 0 and (weight := self.weight) is not None:
            self.learned.see_weight(self._sampled_weight(weight), step)
        due = self.tally.due(self.steps)
        self.steps += 1
        if due:
            _weigh_calls(look for look in looks.values() if look.dy is not None)
        for ticket, look in looks.items():
            if look.count == 0:
                continue
            self.learned.see(look.x, look.dy, look.right, step, self._generator(-1 - ticket))
            if due:
                self._try_to_score(look, step, loss_of)
                self._measure_own(look, step, loss_of)
            self.tally.remember(look.largest)
        return True

    def _try_to_score(self, look: Look, step: int, loss_of: LossOf | None) -> None:
        try:
            self._score(look, step, loss_of)
        except Exception as error:  # what else was seen of the site still counts
            self.unscored = f"scoring failed: {_spell(error)}"

    def _measure_own(self, look: Look, step: int, loss_of: LossOf | None) -> None:
        """What a link of a chain lost in this call, as it ran."""
        if look.own is None or look.weight is None:
            return
        try:
            loss = None if loss_of is None else loss_of(look.call)
            self.own.see(look, look.weight, loss, step)
        except Exception as error:
            self.unscored = f"the chain's own way was not measured: {_spell(error)}"

    def _score(self, look: Look, step: int, loss_of: LossOf | None) -> None:
        """What every recipe would have done to the loss in this call."""
        weight = look.weight
        if weight is None:
            self.unscored = f"sites of the kind {self.adapter.kind!r} have no score"
            return
        if look.dy is None:
            self.unscored = "no gradient was seen"
            return
        loss = None if loss_of is None else loss_of(look.call)
        if loss is None:
            self.unscored = UNKNOWN_LOSS
            return
        self.tally.see(look.show(weight, loss, self.tally.largest), step)

    def _sampled_weight(self, weight: Tensor) -> Tensor:
        """Of a GEMM's weight everything; of a table, which may be huge, some rows."""
        flat = weight.detach().reshape(-1, weight.shape[-1])
        if self.adapter.kind != "lookup":
            return flat
        return take_rows(flat, -1, choose_rows(flat.shape[0], self._rows, self._generator(self.calls)))

    @torch.no_grad()
    def snapshot(self) -> None:
        """Take the weight into its matrix normal."""
        if self.learned is not None and self.adapter.kind != "lookup":
            self.learned.snapshot(self.weight)

    def release(self) -> None:
        """Give back what only drawing needed: factors of covariances, as large as those themselves. They are made again when needed."""
        if self.learned is not None:
            self.learned.release()

    def describe(self) -> list[TensorStats]:
        """The statistics that have seen anything."""
        return [] if self.learned is None else self.learned.describe()

    @property
    def covariance_kind(self) -> str:
        """How the covariances of x and dy and the matrix normal of W are kept, for the report."""
        return "nothing seen" if self.learned is None else self.learned.kind

    def draw(self, role: Role, source: Source, count: int, generator: torch.Generator) -> Tensor:
        """float32: `count` rows of x [count, K] or dy [count, N], or one weight [N, K]. See `loka.probe.source`."""
        return self._seen().draw(role, source, count, generator, self.weight)

    def draw_pair(self, source: Source, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x and dy; of real rows, x and dy of the same examples."""
        return self._seen().draw_pair(source, count, generator)

    def at(self, time: Literal["first", "latest"]) -> "Watch":
        """The site as its first or latest complete window showed it: a watch to read, not to look with."""
        learned = self._seen()
        rows = learned.windows.first if time == "first" else learned.windows.latest
        if rows.kept == 0:
            raise ValueError(f"{self.name}: no window of training is complete yet")
        then = copy.copy(self)
        then.learned = self._make_learned(learned.widths, self.device)
        then.learned.recall(rows, learned, self._generator(0))
        # the score is of all looks: a window alone is judged by its errors
        then.tally, then.own = Tally(self.tally.recipes), OwnTally()
        then.on = False
        return then

    def _seen(self) -> Learned:
        if self.learned is None:
            raise ValueError(f"{self.name}: never called on a sampled step, so there is nothing to draw from")
        return self.learned

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as flat named tensors."""
        counts = [self.calls, self.rows_seen, self.largest, int(self.needs_dgrad), self.steps, *self._shape]
        state = {} if self.learned is None else self.learned.state_dict()
        state |= {f"score.{key}": value for key, value in self.tally.state_dict().items()}
        state |= {f"own.{key}": value for key, value in self.own.state_dict().items()}
        if self._whole is not None:
            state["whole"] = self._whole.cpu().clone()
        return {**state, "counts": torch.tensor(counts), "forward_only": torch.tensor(self.forward_only)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self.calls, self.rows_seen, self.largest, dgrad, self.steps, k, n = state["counts"].tolist()
        self.needs_dgrad, self.forward_only = bool(dgrad), bool(state.get("forward_only", False))
        if "whole" in state:
            self._whole = state["whole"].to(self.device, copy=True)
        self.tally.load_state_dict(_part(state, "score."), self.device)
        if own := _part(state, "own."):
            self.own.load_state_dict(own)
        if (k, n) == (0, 0):
            return
        if self.learned is None:
            self._prepare(k, n, self.device)
        self._seen().load_state_dict(state)

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add what the watch of the same site has seen on another rank, given as its state."""
        calls, rows_seen, largest, dgrad, steps, k, n = state["counts"].tolist()
        if (k, n) != (0, 0):
            if self.learned is None:
                self._prepare(k, n, self.device)
            mine = self._seen()
            other = self._make_learned(mine.widths, torch.device("cpu"))
            other.load_state_dict(state)
            mine.merge(other, self._generator(self.calls + calls))
        theirs = Tally(self.tally.recipes)
        theirs.load_state_dict(_part(state, "score."), self.device)
        self.tally.merge(theirs)
        if own := _part(state, "own."):
            chained = OwnTally()
            chained.load_state_dict(own)
            self.own.merge(chained)
        self.calls, self.rows_seen = self.calls + calls, self.rows_seen + rows_seen
        self.largest, self.steps = max(self.largest, largest), max(self.steps, steps)
        self.needs_dgrad |= bool(dgrad)


def _spell(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _weigh_calls(looks: Iterable[Look]) -> None:
    """Calls of a linear in one call of the model count the same, however many rows of each are scored; those that nothing depends on do not count."""
    together: defaultdict[int, list[tuple[Look, int]]] = defaultdict(list)
    for look in looks:
        together[look.call].append((look, look.rows_to_score().numel() // look.together))
    for calls in together.values():
        mean = sum(rows for _, rows in calls) / len(calls)
        for look, rows in calls:
            look.calls, look.weighs = len(calls), mean / max(rows, 1)
