"""Watching one site: what its GEMMs are given on sampled steps.

A look is one call of the module on a sampled step. The forward takes up to `rows` rows of x, one from each of as many equal parts of the batch; the
backward takes the same rows of dy; both are copies. Nothing is computed from them until the step is over (`absorb`), so that the step itself only
gathers. Rows are drawn from a generator seeded by the site and the number of the look: a probe changes no random state, and continues after
a crash as if there had been none.

    calls under no_grad, or in a module never called      nothing is recorded
    a module called twice in a step                       two looks, each x with its own dy
    recomputation by activation checkpointing             recognised (autograd is running) and not counted again; with reentrant checkpoints,
                                                          whose first forward runs without gradients, the recomputation is the look
    empty batches                                         counted as calls of no rows
    non-finite values                                     counted; their rows stay out of the covariance

Weights change slowly: their statistics are taken at every tenth step with a look, the matrix normal only at snapshots.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from loka.probe.adapter import Adapter
from loka.probe.learned import Learned
from loka.probe.ledger import Ledger
from loka.probe.reservoir import Reservoir
from loka.probe.rows import choose_rows, take_example, take_rows
from loka.probe.seeing import NO_TICKET, enroll, inside_backward
from loka.probe.source import Source
from loka.records import GEMMS, Gemm, Role, TensorStats

WEIGHT_EVERY = 10


@dataclass
class Look:
    """Rows of one call, waiting for its gradient and for the end of the step."""

    x: Tensor
    index: Tensor | None  # which rows of how many; None: all
    right: Tensor | None  # the second operand of one example, where that is an activation
    dy: Tensor | None = None


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
    ) -> None:
        self.name, self.module, self.adapter = name, module, adapter
        self.type = type(module).__name__
        self.on = True  # whether it is this site's turn; read when an op runs, never when a graph is made
        self._rows, self._seed, self._ledger, self._window = rows, seed, ledger, window
        self.calls = self.rows_seen = self.largest = self.steps = 0
        self.needs_dgrad = False
        self.learned: Learned | None = None
        self._pending: dict[int, Look] = {}
        self._shape = (0, 0)
        self._outside = 0  # calls of this step that were no recomputation
        self.number = enroll(self)
        parameter = next(module.parameters(), None)
        self.token = torch.zeros(1, dtype=torch.int32, device=None if parameter is None else parameter.device)
        self.grad_token = self.token.clone()
        if (weight := self.weight) is not None:
            self._prepare(weight.shape[-1], weight.shape[-2], weight.device)

    @property
    def weight(self) -> Tensor | None:
        """The parameter, [N, K] or [experts, N, K]; None where both operands are activations."""
        return None if self.adapter.weight is None else self.adapter.weight(self.module)

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
        if self.learned is None or not self.calls or self.adapter.kind == "lookup":
            return []
        absent = set() if self.learned.reservoir.has_dy else {"dgrad", "wgrad"}
        if not self.needs_dgrad:
            absent.add("dgrad")
        weight = self.weight
        if weight is not None and not weight.requires_grad:
            absent.add("wgrad")
        return [gemm for gemm in GEMMS if gemm not in absent]

    @torch.no_grad()
    def see_forward(self, x: Tensor, right: Tensor | None, needs_dgrad: bool, dtype: torch.dtype | None = None) -> int:
        """One call: its operands. Returns the ticket to bring with the gradient; `dtype` is what the GEMM casts x to."""
        if not self.on:
            return NO_TICKET
        if inside_backward():
            if self._outside:
                return self._recall(x.detach())
        else:
            self._outside += 1
        if self.learned is None:
            assert right is not None
            self._prepare(x.shape[-1], right.shape[-2], x.device)
        count = x.numel() // max(x.shape[self.adapter.channel], 1)
        ticket, self.calls = self.calls, self.calls + 1
        self.rows_seen += count
        self.largest = max(self.largest, count)
        self.needs_dgrad |= needs_dgrad
        if count == 0:
            return NO_TICKET
        generator = self._generator(ticket)
        index = choose_rows(count, self._rows, generator)
        rows = take_rows(x.detach(), self.adapter.channel, index)
        example = None if right is None else take_example(right.detach(), generator)
        self._pending[ticket] = Look(rows if dtype is None else rows.to(dtype), index, example)
        return ticket

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

    @torch.no_grad()
    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """The gradient of a call's output; a second one for the same call is not counted."""
        look = self._pending.get(ticket)
        if look is not None and look.dy is None:
            look.dy = take_rows(dy.detach(), self.adapter.channel, look.index)

    def _generator(self, look: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + look) % 2**63)

    @torch.no_grad()
    def absorb(self, step: int) -> bool:
        """The step is over: learn from what it showed. Returns whether it showed anything."""
        looks, self._pending, called = self._pending, {}, self._outside or self._pending
        self._outside = 0
        if not called or self.learned is None:
            return bool(called)
        if self.steps % WEIGHT_EVERY == 0 and (weight := self.weight) is not None:
            self.learned.see_weight(self._sampled_weight(weight), step)
        self.steps += 1
        for ticket, look in looks.items():
            self.learned.see(look.x, look.dy, look.right, step, self._generator(-1 - ticket))
        return True

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
        return {**state, "counts": torch.tensor(counts)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self.calls, self.rows_seen, self.largest, dgrad, self.steps, k, n = state["counts"].tolist()
        self.needs_dgrad = bool(dgrad)
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
        self.calls, self.rows_seen = self.calls + calls, self.rows_seen + rows_seen
        self.largest, self.steps = max(self.largest, largest), max(self.steps, steps)
        self.needs_dgrad |= bool(dgrad)
