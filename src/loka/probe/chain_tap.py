"""Observing chains: on sampled steps, calls of a chain are traced, and every link is passed to the watch of its linear.

Every linear carries a tap. A chain that begins at that linear checks the tap in every call, which costs one `if` on
other steps. On a sampled step the tap chooses rows, runs the chain a second time (`loka.lowp.chain_trace`), and passes
to each linear's watch its rows of x, W and later dy, before rounding and as the chain multiplied them. Chains that are
placed, split or released while a probe is attached are observed from the next step on. In a compiled model the tap uses
the same two ops as any site (`loka.probe.seeing`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loka.lowp.chain import TAP, Chain, chain_of
from loka.lowp.chain_trace import Trace
from loka.probe.hook import Switch, compute_dtype
from loka.probe.look import Look, Own
from loka.probe.loss import LossWatch
from loka.probe.rows import choose_clusters
from loka.probe.seeing import NO_TICKET, Tap, enroll, inside_backward, probe_see
from loka.probe.watch import Watch


class _Unsaved:
    """Becomes None when copied or pickled, so that a copied or saved model is not observed."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _Taps(_Unsaved):
    """The taps of several probes at one head. Each observes the chain independently."""

    def __init__(self, taps: tuple["ChainTap", ...]) -> None:
        self.taps = taps

    @property
    def on(self) -> bool:
        return any(tap.on for tap in self.taps)

    def see(self, chain: Chain, x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        for tap in self.taps:
            if tap.on:
                y = tap.see(chain, x, y, seed)
        return y


def _taps_at(head: nn.Module) -> tuple["ChainTap", ...]:
    found = head.__dict__.get(TAP)
    return () if found is None else found.taps if isinstance(found, _Taps) else (found,)


def attach(tap: "ChainTap") -> None:
    """Attach a tap to its head, in addition to those already there."""
    taps = (*_taps_at(tap.head), tap)
    tap.head.__dict__[TAP] = tap if len(taps) == 1 else _Taps(taps)


def detach(tap: "ChainTap") -> None:
    """Remove a tap from its head. Other taps stay."""
    taps = tuple(other for other in _taps_at(tap.head) if other is not tap)
    if taps:
        tap.head.__dict__[TAP] = taps[0] if len(taps) == 1 else _Taps(taps)
    else:
        tap.head.__dict__.pop(TAP, None)


class ChainTap(_Unsaved):
    """Observes the chain that begins at a linear."""

    def __init__(
        self, switch: Switch, head: nn.Linear, watches: Mapping[int, Watch], loss: LossWatch, *, rows: int, seed: int
    ) -> None:
        self._switch, self.head, self._watches, self._loss = switch, head, watches, loss
        self._rows, self._seed = rows, seed
        self._calls = 0
        self._pending: dict[int, tuple[Trace, list[tuple[Watch | None, int]]]] = {}
        self._seen: set[int] = set()
        self.number = enroll(self)
        first = next(head.parameters(), None)  # not `head.weight`: reading a parametrized weight may change its state
        self.token = torch.zeros(1, dtype=torch.int32, device=None if first is None else first.device)
        self.grad_token = self.token.clone()

    @property
    def on(self) -> bool:
        """Whether the current step is sampled."""
        return self._switch.on and (torch.is_grad_enabled() or self._switch.ungraded)

    def see(self, chain: Chain, x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        """Observe one call of the chain. Never raises; returns y with unchanged values."""
        graded = torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            with torch.no_grad():
                ticket = probe_see(self.token, x.to(compute_dtype(x)), seed, None, self.number, x.requires_grad, graded)
            tapped = graded and y.requires_grad
            return Tap.apply(y, ticket, self.grad_token, self.number) if tapped else y  # type: ignore[no-untyped-call]
        number = self.see_forward(x, seed, x.requires_grad, graded=graded, dtype=compute_dtype(x))
        if number != NO_TICKET and y.requires_grad:
            y.register_hook(lambda dy: self.see_backward(number, dy))  # type: ignore[no-untyped-call]
        return y

    def see_forward(
        self,
        x: Tensor,
        right: Tensor | None,
        needs_dgrad: bool,
        *,
        weight: Tensor | None = None,
        graded: bool = True,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Record the chain's input; returns the ticket for the gradient of its output. `right` is the dropout seed."""
        chain = chain_of(self.head)
        if chain is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # must not be captured
            return NO_TICKET
        watches = [self._watches.get(id(linear)) for linear in chain.linears]
        if not any(watch is not None and watch.on and watch.off is None for watch in watches):
            return NO_TICKET
        try:
            if inside_backward() and self._pending:  # checkpoint recomputation, last call first
                waiting = [ticket for ticket in self._pending if ticket not in self._seen]
                return waiting[-1] if waiting else NO_TICKET
            with torch.autocast(x.device.type, enabled=False):
                return self._look(
                    chain, watches, x, needs_dgrad, dtype or x.dtype, right, graded=graded and chain.frozen is None
                )
        except Exception as error:
            _switch_off(watches, f"looking into the chain {chain.name}", error)
            return NO_TICKET

    def _look(
        self,
        chain: Chain,
        watches: list[Watch | None],
        x: Tensor,
        needs_dgrad: bool,
        dtype: torch.dtype,
        seed: Tensor | None,
        *,
        graded: bool,
    ) -> int:
        count = x.shape[0] if chain.around is not None else x.numel() // max(x.shape[-1], 1)
        examples = x.shape[0] if x.dim() > 2 and x.shape[0] else count
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._calls) % 2**63)
        ticket, self._calls = self._calls, self._calls + 1
        index, together = choose_clusters(examples, count // max(examples, 1), self._rows, generator)
        trace = Trace(chain, x, dtype, index, graded=graded, seed=seed) if count else None
        tickets: list[tuple[Watch | None, int]] = []
        for at, (linear, watch) in enumerate(zip(chain.linears, watches, strict=True)):
            if watch is None:  # excluded by module_filter_fn
                tickets.append((None, NO_TICKET))
                continue
            if trace is None:
                look = Look(x.new_empty(0, linear.in_features), None, None, 0, 0, 1, self._loss.calls, {})
            else:
                link = trace.links[at]
                own, largest = Own(link.x_low, link.w_low, link.w_low_t), {"x": link.x_largest}
                look = Look(link.x, index, None, count, examples, together, self._loss.calls, largest, own=own)
            whole = linear.weight if watch.sharded else None
            tickets.append((watch, watch.see_look(look, needs_dgrad or at > 0, weight=whole, graded=graded)))
        if trace is None or not graded or all(number == NO_TICKET for _, number in tickets):
            return NO_TICKET
        self._pending[ticket] = (trace, tickets)
        return ticket

    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """Record the gradient of the chain's output. A second gradient for the same call is ignored."""
        if ticket not in self._pending or ticket in self._seen:
            return
        self._seen.add(ticket)
        trace, tickets = self._pending[ticket]
        try:
            with torch.autocast(dy.device.type, enabled=False):
                trace.see_gradient(dy)
        except Exception as error:
            _switch_off([watch for watch, _ in tickets], "looking into the backward pass of a chain", error)

    def finish(self) -> None:
        """End the step: pass the gradients of the links to their watches, and drop the traces."""
        pending, self._pending, self._seen = self._pending, {}, set()
        for trace, tickets in pending.values():
            try:
                if trace.finish():
                    self._pass_gradients(trace, tickets)
            except Exception as error:
                _switch_off([watch for watch, _ in tickets], "learning from the backward pass of a chain", error)

    @staticmethod
    def _pass_gradients(trace: Trace, tickets: list[tuple[Watch | None, int]]) -> None:
        for (watch, number), link in zip(tickets, trace.links, strict=True):
            if watch is not None:
                assert link.dy is not None
                assert link.dy_low is not None
                assert link.dy_largest is not None
                assert link.dy_left is not None
                watch.see_link_gradient(number, link.dy, link.dy_low, link.dy_largest, link.dy_left)


def _switch_off(watches: list[Watch | None], doing: str, error: BaseException) -> None:
    for watch in watches:
        if watch is not None:
            watch.switch_off(doing, error)


def follows_head(module: nn.Module) -> nn.Module | None:
    """Return the head of the chain that a linear runs in, or None if it is in none or is itself the head."""
    chain = chain_of(module)
    return None if chain is None or chain.linears[0] is module else chain.linears[0]
