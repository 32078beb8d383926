"""Scales that do not come from the tensor they scale: delayed ones from earlier steps, static ones from a calibration.

A dynamic scale needs the largest magnitude of a tensor before the tensor can be quantised: two reads. A scale known beforehand needs one, and lets the
quantisation join the kernel that makes the tensor.

    delayed    scale = 2^margin * max(last `history` steps' amax) / format.max
    static     scale = 2^margin * amax seen while calibrating     / format.max          activations only: gradients have no bound

Within a step a delayed scale does not move. Every call only raises `pending`, the largest magnitude of this step so far; `file_amax` files it. So
micro-batches share one scale, and a forward pass that activation checkpointing runs again quantises exactly as the first time. Where there is no history yet
(the first step, or nobody calls `file_amax`), the scale comes from the tensor itself: slower, never wrong. A chain whose plan brought magnitudes has a scale from the first step on; where nobody files
what it sees, it says so and files it itself every now and then (`chain_scales.UNFILED`).

A tensor with a NaN or an Inf leaves no trace in the history. A value beyond the scale saturates; what that costs is part of the error that `Guard` watches.

Scales are kept on each process: they follow the data a rank sees. They are no part of a state_dict; see `loka.placing.scale_state`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import TENSOR, Spec, scale_from_amax
from loka.kernels.amax_history.plain import given_scale


@dataclass(frozen=True)
class Scaling:
    """How delayed scales are made from the magnitudes of earlier steps.

    Args:
        history: steps whose largest magnitude counts.
        margin: headroom in powers of two: 1 halves the range used and survives a doubling within a step.

    Example:
        >>> LinearOptions(scales="delayed", scaling=Scaling(history=64, margin=1))
    """

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
        return torch.zeros((), dtype=torch.float32, device=x.device)
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
    """The magnitudes of one operand over the steps. All tensors live beside the operand; none is a module's buffer.

    history    the steps' largest magnitudes, newest first
    largest    of the history; 0: none yet
    pending    of this step so far; kernels raise it in place
    scale      2^margin * largest / 448, for kernels that are given an E4M3 scale; the last one stays where a step saw nothing
    saturated  steps whose largest magnitude did not fit the scale that was in force
    static     from a calibration
    """

    _TENSORS = ("history", "largest", "pending", "scale", "saturated", "static")

    def __init__(self, scaling: Scaling, device: torch.device, *, floor: float = 0.0) -> None:
        self.scaling, self.floor = scaling, floor  # floor: a magnitude that every scale reaches, whatever was seen
        self.headroom = 2.0**scaling.margin
        self.history = torch.zeros(scaling.history, dtype=torch.float32, device=device)  # whatever the default type is
        for name in self._TENSORS[1:]:
            setattr(self, name, torch.zeros((), dtype=torch.float32, device=device))
        self.scale.fill_(1.0)
        self.calibrating = False
        self.calibrated = False

    largest: Tensor
    pending: Tensor
    scale: Tensor
    saturated: Tensor
    static: Tensor

    def observe(self, amax: Tensor) -> None:
        """Raise this step's largest magnitude."""
        self.pending.copy_(torch.maximum(self.pending, amax))

    def start_from(self, amax: float) -> None:
        """Begin with a magnitude that was measured before, so that the first step has a scale."""
        self.history.zero_()
        self.history[0] = amax
        self.largest.fill_(amax)
        self.scale.copy_(given_scale(self.largest, self.headroom, self.floor))

    def scale_for(self, spec: Spec | None, now: Tensor) -> Tensor | None:
        """The scale of an operand under a spec; None where the quantiser makes it. `now` is the operand's own amax."""
        if spec is not None and spec.mode == "static":
            return scale_from_amax(self.static * self.headroom, spec)
        return delayed_scale(spec, self.largest, now, self.headroom)

    def calibrate(self, amax: Tensor) -> None:
        """Raise the magnitude that static scales are made from."""
        self.static.copy_(torch.maximum(self.static, amax))

    def to(self, device: torch.device) -> None:
        """Move everything."""
        for name in self._TENSORS:
            setattr(self, name, getattr(self, name).to(device))

    def state(self) -> dict[str, Tensor]:
        """What must survive a restart; the history newest first."""
        return {
            "history": self.history.clone(),
            "pending": self.pending.clone(),
            "static": self.static.clone()
            if self.calibrated
            else torch.full_like(self.static, -1),  # -1: not calibrated
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """The counterpart. A history of another length is cut, or filled with nothing."""
        newest = state["history"].to(self.history)[: len(self.history)]
        self.history.zero_()
        self.history[: len(newest)].copy_(newest)
        self.largest.copy_(self.history.max())
        self.scale.copy_(given_scale(self.largest, self.headroom, self.floor))
        self.pending.copy_(state["pending"])
        self.calibrated = bool(state["static"] > 0)
        self.static.copy_(state["static"].clamp(min=0))


def delayed_scale(spec: Spec | None, largest: Tensor, now: Tensor, headroom: float) -> Tensor | None:
    """The scale of an operand from its history, or from its own amax (`now`) where there is none; None where the quantiser makes the scale."""
    if spec is None or spec.mode == "dynamic":
        return None
    return scale_from_amax(torch.where(largest > 0, largest, now) * headroom, spec)
