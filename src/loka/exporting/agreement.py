"""Compare an exported file with the model it was made from.

Both compute the same, but not in the same order: the file has other kernels, and sums differ in their last bits. In a
model of 16 or 32 bits that stays small. A value next to the boundary of two FP8 numbers, however, becomes the other one,
6 to 12 % away, and every later FP8 layer multiplies such values: the results of a small Wukong of four layers move by
2.4 % if its inputs change by a 4,000th. No file can agree with such a model more closely than the model with itself. So a file that
is not within CLOSE is compared with how far the model's own results move when what it reads is rounded differently.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.exporting.signature import Arguments, flatten_result
from loka.formats import relative_l2
from loka.units.example import call_model

CLOSE = 0.01  # relative L2 that is always accepted, unless the caller gives a tolerance
NUDGE = 2.0**-8  # a unit in the last place of bf16: half of all bf16 numbers become a neighbor, the others stay

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Agreement:
    """How closely a file agrees with its model.

    Args:
        difference: largest relative L2 difference over all results and compared sizes.
        rows: sizes of the first dimension that were compared.
        moved: how far the model's own results move if its inputs are rounded differently; None if it was not needed.

    Example:
        >>> Agreement(0.0008, [64, 67]).accepts(None)
        True
    """

    difference: float
    rows: list[int]
    moved: float | None = None

    def accepts(self, tolerance: float | None) -> bool:
        """Return whether the difference is within the tolerance; None: within CLOSE, or what the model itself moves."""
        moved = self.moved if self.moved is not None and math.isfinite(self.moved) else 0.0  # Inf excuses nothing
        return self.difference <= (max(CLOSE, moved) if tolerance is None else tolerance)


def compare(
    run: Run,
    model: nn.Module,
    arguments: Arguments,
    inputs: Sequence[str],
    expected: list[Tensor],
    *,
    dynamic: bool,
    tolerance: float | None,
) -> Agreement:
    """Compare a file with the model, at the example's rows and, if they are dynamic, at 3 more.

    Args:
        run: runs the file on tensors in the order of `inputs`.
        model: the model it was made from.
        arguments: the example.
        inputs: names of the tensors that the file reads.
        expected: the model's results for the example.
        dynamic: whether the file takes any number of rows.
        tolerance: largest accepted difference; None: see `Agreement.accepts`.

    Returns:
        The differences.

    Raises:
        ValueError: the file differs by more, or returns other shapes.
    """
    tensors = arguments.tensors
    rows = [next((tensors[name].shape[0] for name in inputs if tensors[name].dim()), 0)]
    worst = differ(run([tensors[name] for name in inputs]), expected)
    if dynamic and all(t.dim() for t in tensors.values()) and {t.shape[0] for t in tensors.values()} == {rows[0]}:
        other = {name: torch.cat([t, t.flip(0)[:3]]) for name, t in tensors.items()}
        wanted = flatten_result(call_model(model, arguments.rebuild(other)))
        worst = max(worst, differ(run([other[name] for name in inputs]), wanted))
        rows.append(rows[0] + 3)
    close = worst <= (CLOSE if tolerance is None else tolerance)
    moved = None if close or tolerance is not None else _move(model, arguments, expected)
    found = Agreement(worst, rows, moved)
    if not found.accepts(tolerance):
        own = (
            ""
            if moved is None
            else f", and more than the {moved:.3g} that the model's own results move if its inputs are rounded differently"
        )
        raise ValueError(
            f"the exported file differs from the model by {worst:.3g} (relative L2), more than "
            f"{CLOSE if tolerance is None else tolerance:g}{own}; nothing was written; hint: a larger tolerance=, "
            "if that is acceptable"
        )
    return found


def _move(model: nn.Module, arguments: Arguments, expected: list[Tensor]) -> float:
    """Return how far the model's results move if its inputs and what its tables return change by up to NUDGE."""
    generator = torch.Generator().manual_seed(0)

    def nudge(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        noise = torch.rand(x.shape, generator=generator).to(x.device)
        return (x.float() * (1 + NUDGE * (2 * noise - 1))).to(x.dtype)

    with _nudged_tables(model, nudge):
        moved = call_model(model, arguments.rebuild({name: nudge(t) for name, t in arguments.tensors.items()}))
    return differ(flatten_result(moved), expected)


@contextmanager
def _nudged_tables(model: nn.Module, nudge: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what embedding tables return: a model of ids has no other inputs of floating point."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    hooks = [table.register_forward_hook(lambda _module, _given, result: nudge(result)) for table in tables]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def differ(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative L2 difference of two lists of results; raise ValueError if their shapes differ."""
    shapes, wanted = ([tuple(t.shape) for t in each] for each in (got, expected))
    if shapes != wanted:
        raise ValueError(f"the exported file returns {shapes}, the model {wanted}")
    pairs = [(widest(a), widest(b)) for a, b in zip(got, expected, strict=True) if b.numel()]
    return max((_distance(a, b) for a, b in pairs), default=0.0)


def _distance(got: Tensor, expected: Tensor) -> float:
    """Return the relative L2 difference; infinite values, such as scores that are masked out, must be the same.

    NaN is an infinite difference: `max` would pass over it.
    """
    infinite = expected.isinf()
    if not torch.equal(got[infinite], expected[infinite]):
        return math.inf
    found = float(relative_l2(got[~infinite], expected[~infinite]))
    return math.inf if math.isnan(found) else found


def widest(t: Any) -> Tensor:
    """Return a result in float64 on the host, complex numbers as pairs."""
    t = t.detach().cpu()
    found: Tensor = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()
    return found
