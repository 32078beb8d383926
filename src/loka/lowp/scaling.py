"""Scales that do not come from the tensor they scale: delayed ones from earlier steps, static ones from a calibration.

A dynamic scale needs the largest magnitude of a tensor before the tensor can be quantised: two reads. A scale known beforehand needs one, and lets the
quantisation join the kernel that makes the tensor.

    delayed    scale = 2^margin * max(last `history` steps' amax) / format.max
    static     scale = 2^margin * amax seen while calibrating     / format.max          activations only: gradients have no bound

Within a step a delayed scale does not move. Every call only raises `pending`, the largest magnitude of this step so far; `finish_step` files it. So
micro-batches share one scale, and a forward pass that activation checkpointing runs again quantises exactly as the first time. Where there is no history yet
(the first step, or nobody calls `finish_step`), the scale comes from the tensor itself: slower, never wrong.

A tensor with a NaN or an Inf leaves no trace in the history. A value beyond the scale saturates; what that costs is part of the error that `Guard` watches.

Scales are kept on each process: they follow the data a rank sees. They are no part of a state_dict; see `loka.placing.scale_state`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import TENSOR, Spec, scale_from_amax

__all__ = ["AmaxState", "Scaling", "check_mode", "delayed_scale", "find_amax", "finish_step"]


@dataclass(frozen=True)
class Scaling:
    """How scales are remembered. `margin` is headroom in powers of two: 1 halves the range used and survives a doubling within a step."""

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        if type(self.history) is not int or not 1 <= self.history <= 4096:
            raise ValueError(f"history={self.history!r}: expected 1 to 4096 steps")
        if type(self.margin) is not int or not 0 <= self.margin <= 8:
            raise ValueError(f"margin={self.margin!r}: expected 0 to 8 powers of two")


def find_amax(x: Tensor) -> Tensor:
    """Largest magnitude, float32, in one read; 0 where x is empty or has a NaN or an Inf."""
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    largest = torch.linalg.vector_norm(x, float("inf")).float()
    return torch.where(largest < float("inf"), largest, torch.zeros_like(largest))  # NaN < inf is false


def check_mode(spec: Spec, role: str) -> None:
    """Refuse scales that cannot be remembered: only a tensor's one scale means the same thing in the next batch."""
    if spec.mode != "dynamic" and spec.block != TENSOR:
        raise ValueError(
            f"{role}: {spec} has a {spec.mode} scale per {spec.block}; rows and blocks of the next batch are other examples, "
            f"so a {spec.mode} scale is one per tensor; hint: {spec.format}:tensor:{spec.mode}"
        )


class AmaxState:
    """The magnitudes of one operand over the steps. All tensors live beside the operand; none is a module's buffer."""

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self.scaling = scaling
        self.headroom = 2.0**scaling.margin
        self.history = torch.zeros(scaling.history, device=device)
        self.position = 0  # where the next step is filed
        self.largest = torch.zeros((), device=device)  # of the history; 0: none yet
        self.pending = torch.zeros((), device=device)  # of this step so far
        self.static = torch.zeros((), device=device)  # from the calibration
        self.calibrating = False
        self.calibrated = False

    def observe(self, amax: Tensor) -> None:
        """Raise this step's largest magnitude."""
        self.pending.copy_(torch.maximum(self.pending, amax))

    def scale(self, spec: Spec | None, now: Tensor) -> Tensor | None:
        """The scale of an operand under a spec; None where the quantiser makes it. `now` is the operand's own amax."""
        if spec is not None and spec.mode == "static":
            return scale_from_amax(self.static * self.headroom, spec)
        return delayed_scale(spec, self.largest, now, self.headroom)

    def calibrate(self, amax: Tensor) -> None:
        """Raise the magnitude that static scales are made from."""
        self.static.copy_(torch.maximum(self.static, amax))

    def to(self, device: torch.device) -> None:
        """Move everything."""
        for name in ("history", "largest", "pending", "static"):
            setattr(self, name, getattr(self, name).to(device))

    def state(self) -> dict[str, Tensor]:
        """What must survive a restart; the history newest first."""
        return {
            "history": torch.roll(self.history, -self.position).flip(0),
            "pending": self.pending.clone(),
            "static": self.static.clone()
            if self.calibrated
            else torch.full_like(self.static, -1),  # -1: not calibrated
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """The counterpart. A history of another length is cut, or filled with nothing."""
        newest = state["history"].to(self.history)[: len(self.history)]
        self.history.zero_()
        self.history[: len(newest)].copy_(newest.flip(0))
        self.position = len(newest) % len(self.history)
        self.largest.copy_(self.history.max())
        self.pending.copy_(state["pending"])
        self.calibrated = bool(state["static"] > 0)
        self.static.copy_(state["static"].clamp(min=0))


def delayed_scale(spec: Spec | None, largest: Tensor, now: Tensor, headroom: float) -> Tensor | None:
    """The scale of an operand from its history, or from its own amax (`now`) where there is none; None where the quantiser makes the scale."""
    if spec is None or spec.mode == "dynamic":
        return None
    return scale_from_amax(torch.where(largest > 0, largest, now) * headroom, spec)


@torch.no_grad()
def finish_step(states: Sequence[AmaxState]) -> None:
    """File every state's pending amax and start the next step; a few kernels for all states together."""
    by_device: dict[tuple[torch.device, int], list[AmaxState]] = {}
    for state in states:
        by_device.setdefault((state.history.device, len(state.history)), []).append(state)
    for group in by_device.values():
        slots = [state.history[state.position] for state in group]
        torch._foreach_copy_(slots, [state.pending for state in group])
        torch._foreach_zero_([state.pending for state in group])
        largest = torch.stack([state.history for state in group]).amax(1).unbind()
        torch._foreach_copy_([state.largest for state in group], list(largest))
        for state in group:
            state.position = (state.position + 1) % len(state.history)
