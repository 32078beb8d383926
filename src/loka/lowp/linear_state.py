"""The state of a converted linear besides its parameters: quantized weights, magnitudes, counters."""

from typing import Any

import torch
from torch import Tensor, nn

from loka.lowp.binding import LinearBinding
from loka.lowp.scaling import AmaxState
from loka.lowp.weight_cache import WeightCache


class LinearState:
    """The state of a Linear. Nothing in it is a buffer, so it is in no state_dict and DDP does not broadcast it."""

    def __init__(self, binding: LinearBinding, weight: Tensor) -> None:
        device = weight.device
        self.name = ""
        self.note = ""  # why it does not run what it was converted to
        self.weights: WeightCache | None = None
        self.health: Tensor | None = None
        self.watching = False
        remembered = [any(s.mode != "dynamic" for s in specs.values()) for specs in (binding.x_specs, binding.dy_specs)]
        self.x = AmaxState(binding.scaling, device) if remembered[0] else None
        self.dy = AmaxState(binding.scaling, device) if remembered[1] else None

    @property
    def amax_states(self) -> dict[str, AmaxState]:
        """The amax states of the operands with remembered scales."""
        return {name: state for name, state in (("x", self.x), ("dy", self.dy)) if state is not None}

    def to(self, device: torch.device) -> None:
        """Move the state to a device, except for quantized weights, which are created there again."""
        for state in self.amax_states.values():
            state.to(device)
        if self.health is not None:
            self.health = self.health.to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "weights": None}  # a copied module creates its own


def can_cache(weight: Tensor | None, binding: LinearBinding) -> bool:
    """Check whether a quantized weight can be cached: a plain parameter with storage, and one level of scales."""
    if weight is None or type(weight) is not nn.Parameter or weight.device.type == "meta":
        return False
    return all(spec.scale != "e4m3" for spec in binding.weight_specs.values())
