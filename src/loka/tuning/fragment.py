"""Cut a unit out of its model, to time it by itself."""

from collections.abc import Mapping
from copy import deepcopy

import msgspec
import torch
from torch import Tensor, nn

from loka.lowp.step import end_step
from loka.nn.wrapping import named_sites
from loka.records import UnitPlan
from loka.tuning import timing
from loka.units.following import make_activation


class Fragment(nn.Module):
    """A unit cut out of its model: copies of its modules, run one after another.

    An operation before and one after them give the compiler something to fuse with, as in the model.

    Args:
        parts: copies of the modules by name, in the order they run.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.order = [_flatten(name) for name in parts]
        for name, part in parts.items():
            self.add_module(_flatten(name), part)

    def forward(self, x: Tensor) -> Tensor:
        """Run the unit between an addition and a multiplication."""
        x = x + 1.0
        for name in self.order:
            x = getattr(self, name)(x)
        return x * 0.5


def _flatten(name: str) -> str:
    """Return the name of a copy: a module name without dots, which a direct child cannot have."""
    return name.replace(".", "_")


def make_fragment(model: nn.Module, unit: UnitPlan) -> tuple[Fragment, UnitPlan]:
    """Copy the modules of a unit into a fragment.

    Args:
        model: the model of the unit; it is not changed.
        unit: a unit of `loka.units.discover`.

    Returns:
        The fragment, and the unit with the names that it has there.
    """
    modules, parts, links = dict(named_sites(model)), dict[str, nn.Module](), []
    for index, link in enumerate(unit.links):
        names = [link.linear, *link.passed]
        parts |= {name: deepcopy(modules[name]) for name in names}
        if link.called:
            names.append(f"function_{index}")
            parts[names[-1]] = make_activation(link.activation, link.slope)
        dropout = link.dropout_site
        if link.dropout is not None and dropout not in link.passed:
            dropout = f"dropout_{index}"
            names.append(dropout)
            parts[dropout] = nn.Dropout(link.dropout)
        links.append(
            msgspec.structs.replace(
                link,
                linear=_flatten(link.linear),
                passed=[_flatten(name) for name in names[1:]],
                callers=[],
                called=False,
                norm_site=None if link.norm_site is None else _flatten(link.norm_site),
                dropout_site=None if dropout is None else _flatten(dropout),
            )
        )
    magnitudes = {_flatten(name): value for name, value in unit.magnitudes.items()}
    copied = msgspec.structs.replace(unit, name=links[0].linear, links=links, magnitudes=magnitudes, around=None)
    return Fragment(parts), copied


def capture_fragment(
    fragment: nn.Module, x: Tensor, *, training: bool, autocast: torch.dtype | None
) -> timing.Captured:
    """Compile one step of a fragment and capture it.

    Args:
        fragment: in training or eval mode.
        x: its input.
        training: forward, backward and what an optimizer step does to low precision; otherwise forward only.
        autocast: autocast dtype.

    Returns:
        The captured step.
    """
    run = torch.compile(fragment, dynamic=False)
    x = x.clone().requires_grad_(training)

    def step() -> None:
        with torch.set_grad_enabled(training):
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                y = run(x)
            if training:
                y.sum().backward()
                end_step(timing.converted_modules(fragment))
                x.grad = None
                fragment.zero_grad(set_to_none=True)

    return timing.capture(step, fragment)
