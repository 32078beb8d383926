"""Measure the largest magnitudes (amax) that a unit's scales are computed from, while the model runs in high precision.

    with measuring(model, units) as seen:
        for batch in batches:
            loss(model(batch)).backward()         # or only the forward, for serving
    units = seen.units()

A link without a norm is scaled by the largest |output| of its linear, which bounds the output of the activation; a link
with a layer or rms norm by the largest |value| it passes on; gradients by the largest |gradient| of the linear's
output; and in serving, the chain's input by the largest |input| of its first linear. Non-finite values are ignored.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka.nn.wrapping import named_sites
from loka.records.unit import LinkPlan, Magnitude, UnitPlan
from loka.units.undisturbed import ordinary_encoders


class Seen:
    """The magnitudes seen so far at the linears of some units; see `measuring`.

    Args:
        units: the units to measure.

    Example:
        >>> with measuring(model, discover(model, batch).units) as seen, torch.no_grad():
        ...     output = model(batch)
        >>> units = seen.units(headroom=2.0)
    """

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self._units = list(units)
        self._seen: dict[tuple[str, str], Tensor] = {}  # by linear and role: output, gradient or input

    def units(self, headroom: float = 1.0) -> list[UnitPlan]:
        """Return the units with the magnitudes of their linears; a linear that was not called has none.

        Args:
            headroom: a factor on every magnitude: 2 leaves room for values twice as large as those seen.
        """
        return [msgspec.structs.replace(unit, magnitudes=self._magnitudes(unit, headroom)) for unit in self._units]

    def _magnitudes(self, unit: UnitPlan, headroom: float) -> dict[str, Magnitude]:
        called = (name for name in unit.linears if (name, "output") in self._seen)
        roles = ("output", "gradient", "input")
        return {
            name: Magnitude(**{role: headroom * float(self._seen.get((name, role), 0.0)) for role in roles})
            for name in called
        }

    def note(self, name: str, role: str, value: Tensor) -> None:
        """Raise the magnitude of a linear's "output", of its "gradient", or of its "input"."""
        if value.numel() == 0:
            return
        largest = value.detach().abs().nan_to_num(nan=0.0, posinf=0.0).amax().float()
        before = self._seen.get((name, role))
        self._seen[name, role] = largest if before is None else torch.maximum(before, largest)


@contextmanager
def measuring(model: nn.Module, units: Sequence[UnitPlan]) -> Iterator[Seen]:
    """Measure magnitudes at the linears of some units while the model runs in this block.

    Args:
        model: a model that is not converted, wrapped or not.
        units: from `discover`.

    Returns:
        A context manager that yields a `Seen`; call its `units()` after the block.

    Example:
        >>> with measuring(model, discover(model, batch).units) as seen, torch.no_grad():
        ...     output = model(batch)
    """
    seen, modules = Seen(units), dict(named_sites(model))
    with ExitStack() as stack:
        stack.enter_context(ordinary_encoders())
        for unit in units:
            for link in unit.links:
                stack.callback(
                    modules[link.linear].register_forward_hook(_watch_linear(seen, link), with_kwargs=True).remove
                )
                handed = _last_passed(link)
                if handed is not None:
                    stack.callback(modules[handed].register_forward_hook(_watch_handed(seen, link)).remove)
        yield seen


def _last_passed(link: LinkPlan) -> str | None:
    """Return the module whose output sets the scale of a link with a norm.

    A batch norm is folded into the linear, so its own output does: it bounds what follows.
    """
    if link.norm == "batch":
        return link.norm_site
    return link.passed[-1] if link.norm in ("layer", "rms") and link.passed else None


def _watch_linear(seen: Seen, link: LinkPlan) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        seen.note(link.linear, "input", args[0] if args else kwargs["input"])
        if _last_passed(link) is None:
            seen.note(link.linear, "output", output)
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.note(link.linear, "gradient", gradient))  # type: ignore[no-untyped-call]

    return hook


def _watch_handed(seen: Seen, link: LinkPlan) -> Any:
    return lambda module, inputs, output: seen.note(link.linear, "output", output)
