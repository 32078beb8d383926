"""Recognize the loss of a step from the model's output and its gradient.

A score is relative to the loss, which hooks do not see. Common losses can be recovered from the model's output z and g
= dL/dz:

    z is a single number                    the model returns its loss:            L = z g
    binary cross-entropy of logits          c g = sigmoid(z) - y,  y in {0, 1}     L = sum(softplus(z) - y z) / c
    binary cross-entropy of probabilities   c g = (z - y) / (z (1 - z))            L = -sum(log(y ? z : 1 - z)) / c
    cross-entropy of logits                 c g = softmax(z) - onehot(y)           L = sum(log sum exp(z) - z_y) / c

The sign of g gives y; then every element gives c, which is the batch size for a mean, 1 for a sum, and any other number
for a scaled or accumulated loss. The loss counts as recognized only if the c of nine elements in ten agree within 5 %.
L is the value that was differentiated, so g / L does not depend on the reduction. Any other loss must be passed to
`probe.step(loss)`; without it there is no score, and reports say so.

The losses of several outputs are added. If some are not recognized (an auxiliary loss), they are left out, which makes
the loss smaller and the score larger. Everything stays on the device, without synchronization.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from loka.nn.replacing import SEES_CHAINS
from loka.probe.rows import choose_rows, take_rows
from loka.probe.seeing import NO_TICKET, Tap, enroll, inside_backward, probe_see
from loka.records.prose import spell_error

MAX_OUTPUTS = 8  # at most this many tensors of an output are used
MAX_ROWS = 4096  # ... and this many rows of each
AGREE, MOST = 0.05, 0.9
# If the given and the recognized loss differ by more than this factor, a GradScaler or accumulation scaled it.
SCALED = 4.0
Known = tuple[
    Tensor, Tensor
]  # the loss that was differentiated, and the mean loss of an example; NaN if not recognized


class LossWatch:
    """Records the model's output and its gradient on sampled steps."""

    def __init__(self, device: torch.device) -> None:
        self.off: str | None = None  # why it was disabled
        self.calls = 0  # calls of the model in this step
        self._pending: dict[int, tuple[int, Tensor, int, Tensor | None, Tensor | None]] = {}
        self._tickets = 0
        self.number = enroll(self)
        self.token = torch.zeros(1, dtype=torch.int32, device=device)
        self.grad_token = self.token.clone()

    def switch_off(self, error: BaseException) -> None:
        """Stop recording and store the reason."""
        self.off = f"the model's output is not looked at: {spell_error(error)}"
        self._pending = {}

    def see_forward(self, x: Tensor, right: Tensor | None, needs_dgrad: bool, **_: Any) -> int:
        """Record the output of one call, from inside a graph; returns the ticket for its gradient."""
        ticket = self.see_output(x)
        self.calls += 1
        return ticket

    @torch.no_grad()
    def see_output(self, x: Tensor) -> int:
        """Record one output tensor; returns the ticket for its gradient."""
        if self.off is not None or inside_backward():
            return NO_TICKET
        rows = 1 if x.dim() == 0 else x.shape[0] if x.dim() == 1 else x.numel() // max(x.shape[-1], 1)
        matrix = x.detach().reshape(1, 1) if x.dim() == 0 else x.detach().reshape(rows, -1) if x.numel() else None
        if matrix is None:
            return NO_TICKET
        index = choose_rows(rows, MAX_ROWS, torch.Generator().manual_seed(self._tickets))
        ticket, self._tickets = self._tickets, self._tickets + 1
        kept = take_rows(matrix, -1, index).float()
        self._pending[ticket] = (self.calls, kept if x.dim() else kept.reshape(()), rows, index, None)
        return ticket

    @torch.no_grad()
    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """Record the gradient of one output tensor."""
        if ticket not in self._pending:
            return
        try:
            call, z, rows, index, _ = self._pending[ticket]
            matrix = dy.detach().reshape(rows, -1)
            self._pending[ticket] = (call, z, rows, index, take_rows(matrix, -1, index).float().reshape(z.shape))
        except Exception as error:
            self.switch_off(error)

    def settle(self, given: Tensor | float | None) -> Callable[[int], Known | None]:
        """End the step; returns a function from the number of a model call to its loss, or to None if unknown.

        `given` is the loss passed to `probe.step`.
        """
        found: dict[int, list[Known]] = {}
        for call, z, rows, _, g in self._pending.values():
            if g is not None and z.shape == g.shape:
                found.setdefault(call, []).append(recognise(z, g, rows))
        self._pending, self.calls, self._tickets = {}, 0, 0
        known = {call: _add_losses(parts) for call, parts in found.items()}
        told = None if given is None else torch.as_tensor(given).detach().float().reshape(-1).mean()

        def loss_of(call: int) -> Known | None:
            seen = known.get(min(call, max(known))) if known else None
            return seen if told is None else _choose_loss(told.to(self.token.device), seen)

        return loss_of


def _add_losses(parts: list[Known]) -> Known:
    losses, nats = (torch.stack(column) for column in zip(*parts, strict=True))
    none = losses.isnan().all()
    nan = torch.full_like(losses[0], torch.nan)
    return torch.where(none, nan, losses.nansum()), torch.where(none, nan, nats.nansum())


def _choose_loss(told: Tensor, seen: Known | None) -> Known:
    """Return the given loss, unless it was scaled before it was differentiated: then the recognized one."""
    if seen is None:
        return told, torch.ones_like(told)
    loss, nats = seen
    ratio = loss / told
    scaled = loss.isfinite() & ((ratio > SCALED) | (ratio < 1 / SCALED))
    return torch.where(scaled, loss, told), torch.where(loss.isfinite(), nats, torch.ones_like(nats))


def make_output_hook(switch: Any, watch: LossWatch) -> Callable[..., Any]:
    """Make the forward hook of the model itself."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled() or not switch.on:
            return None
        if torch.compiler.is_compiling():
            if not isinstance(output, Tensor) or not output.requires_grad:
                return None
            with torch.no_grad():
                ticket = probe_see(watch.token, output, None, None, watch.number, False, True)
            return Tap.apply(output, ticket, watch.grad_token, watch.number)  # type: ignore[no-untyped-call]
        try:
            for leaf in _iter_outputs(output):
                ticket = watch.see_output(leaf)
                if ticket != NO_TICKET:
                    leaf.register_hook(lambda dy, ticket=ticket: watch.see_backward(ticket, dy))  # type: ignore[no-untyped-call]
        except Exception as error:  # an observer must not raise into a training loop
            watch.switch_off(error)
        watch.calls += 1
        return None

    setattr(hook, SEES_CHAINS, True)
    return hook


def _iter_outputs(output: Any) -> Iterator[Tensor]:
    if not isinstance(output, Tensor | tuple | list | dict) and hasattr(output, "__dict__"):
        output = list(vars(output).values())
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    yield from leaves[:MAX_OUTPUTS]


@torch.no_grad()
def recognise(z: Tensor, g: Tensor, rows: int) -> Known:
    """Return (loss, mean loss of an example) from an output [kept, C] and its gradient; NaN if no known loss fits.

    `rows` is the number of rows of the whole output, of which some were kept.
    """
    nan = torch.full((), torch.nan, device=z.device)
    if z.dim() == 0:
        value = z * g
        return torch.where(value != 0, value, nan), torch.ones_like(nan)
    parts = [_match_binary(z, g, *_from_logits(z, g)), _match_binary(z, g, *_from_probabilities(z, g))]
    if z.dim() == 2 and z.shape[1] > 1:
        parts.insert(0, _match_softmax(z, g))
    loss, nats = nan, nan
    for total, factor in parts:
        fits = loss.isnan() & factor.isfinite()
        loss = torch.where(fits, total * (rows / z.shape[0]) / factor, loss)
        nats = torch.where(fits, total / z.shape[0], nats)
    return loss, nats


def _from_logits(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    positive = g < 0
    return torch.where(positive, -torch.sigmoid(-z), torch.sigmoid(z)), F.softplus(torch.where(positive, -z, z))


def _from_probabilities(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    inside = ((z > 0) & (z < 1)).all()
    p = torch.where(g < 0, z, 1 - z)
    slope = torch.where(g < 0, -1.0, 1.0) / p.clamp(min=1e-12)
    return torch.where(inside, slope, torch.nan), -p.clamp(min=1e-12).log()


def _match_binary(z: Tensor, g: Tensor, slope: Tensor, losses: Tensor) -> Known:
    used = g != 0
    sizes = torch.where(used, g.abs(), torch.nan)
    # Equal gradients (of a plain sum) fit any loss, so require both signs, or magnitudes that vary with z.
    evidence = ((g < 0).any() & (g > 0).any()) | (_spread_ratio(sizes) > 1 + 3 * AGREE)
    agreed = _find_consensus(torch.where(used, slope / g, torch.nan))
    return torch.where(used, losses, 0.0).sum(), torch.where(evidence, agreed, torch.nan)


def _spread_ratio(sizes: Tensor) -> Tensor:
    flat = sizes.reshape(-1)
    return torch.nanquantile(flat, 0.9) / torch.nanquantile(flat, 0.1)


def _match_softmax(z: Tensor, g: Tensor) -> Known:
    """Match softmax cross-entropy: each row with a gradient has exactly one negative entry, its label."""
    used = (g != 0).any(1)
    label = g.argmin(1, keepdim=True)
    one = ((g < 0).sum(1) <= 1) & ((g.sum(1).abs() < 1e-2 * g.abs().sum(1)) | ~used)
    slope = torch.softmax(z, 1).scatter_add(1, label, torch.full_like(z[:, :1], -1.0))
    factor = (slope.gather(1, label) / g.gather(1, label)).squeeze(1)
    losses = torch.logsumexp(z, 1) - z.gather(1, label).squeeze(1)
    factor = torch.where(used & one, factor, torch.nan)
    agreed = torch.where((one | ~used).float().mean() >= MOST, _find_consensus(factor), torch.nan)
    return torch.where(used, losses, 0.0).sum(), agreed


def _find_consensus(factors: Tensor) -> Tensor:
    """Return the factor on which nine elements in ten agree, else NaN. NaN elements (no gradient) do not count."""
    flat = factors.reshape(-1)
    middle = flat.nanmedian()
    said = ~flat.isnan()
    near = ((flat / middle - 1).abs() < AGREE) & said
    fits = (near.sum() >= MOST * said.sum()) & (said.sum() > 0) & (middle > 0)
    return torch.where(fits, middle, torch.full_like(middle, torch.nan))
