"""Scales that are known before the tensor: delayed ones from earlier steps, static ones from a calibration.

A dynamic scale needs the amax of a tensor before it can be quantized: two reads. A scale known beforehand needs one
read, and allows quantization to be fused with the kernel that computes the tensor.

    delayed    scale = 2^margin * max(last `history` steps' amax) / format.max
    static     scale = 2^margin * amax seen while calibrating     / format.max    not for gradients: they have no bound

Within a step a delayed scale is constant. Every call only raises `pending`, the amax of this step so far; `file_amax`
files it at the end of the step. So micro-batches share one scale, and activation checkpointing, which runs a forward
twice, quantizes the same way both times. Without a history (in the first step, or if `file_amax` is never called), the
scale is computed from the tensor itself, which is slower but safe. A chain whose plan has magnitudes has a scale from
the first step on; if no optimizer steps, it warns and files magnitudes itself now and then (`chain_scales.UNFILED`).

A tensor with a NaN or Inf is ignored in the history. Values beyond the scale saturate, which is part of the error that
`Guard` monitors.

One batch with an outlier therefore costs twice. Its own step saturates: at 10 times the usual amax, the error of a
linear's output is 67 % instead of 4 %. Afterwards the scale is too coarse until the outlier has left the history.
Floating point makes up for much of that: nothing is lost up to 1,000 times, 6 % at 10,000 times, half at 100,000 times.

Every process has its own scales, which follow the data of its rank. They are not part of a state_dict; see
`loka.placing.scale_state`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import TENSOR, Spec, scale_from_amax
from loka.kernels.amax_history.plain import given_scale


@dataclass(frozen=True)
class Scaling:
    """How delayed scales are computed from the magnitudes of earlier steps.

    Args:
        history: the number of steps whose largest magnitude counts. After an outlier the scale is too coarse for as many
            steps; with few, an ordinary step may exceed the scale and saturate.
        margin: headroom in powers of two: 1 halves the used range and tolerates a doubling from step to step.

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
    """Return the amax of x in float32, in one read; 0 if x is empty or has a NaN or Inf."""
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    largest = torch.linalg.vector_norm(x, float("inf")).float()
    return torch.where(largest < float("inf"), largest, torch.zeros_like(largest))  # NaN < inf is false


def check_mode(spec: Spec, role: str) -> None:
    """Raise if scales cannot be remembered: only one scale per tensor has the same meaning in the next batch."""
    if spec.mode != "dynamic" and spec.block != TENSOR:
        raise ValueError(
            f"{role}: {spec} has a {spec.mode} scale per {spec.block}; rows and blocks of the next batch are other "
            f"examples, so a {spec.mode} scale is one per tensor; hint: {spec.format}:tensor:{spec.mode}"
        )


class AmaxState:
    """The magnitudes of one operand over the steps. All tensors are on the operand's device; none is a module's buffer.

    history    amax of the last steps, newest first
    largest    of the history; 0 if there is none yet
    pending    amax of this step so far; kernels update it in place
    scale      2^margin * largest / 448, for kernels that take an E4M3 scale; unchanged by a step that saw nothing
    saturated  number of steps whose amax exceeded the scale in use
    static     amax of a calibration
    """

    _TENSORS = ("history", "largest", "pending", "scale", "saturated", "static")

    @torch.inference_mode(False)  # its tensors outlive this call, so they must not be inference tensors
    def __init__(self, scaling: Scaling, device: torch.device, *, floor: float = 0.0) -> None:
        self.scaling, self.floor = scaling, floor  # floor: a lower bound of the magnitude that `scale` is computed from
        self.headroom = 2.0**scaling.margin
        self.history = torch.zeros(scaling.history, dtype=torch.float32, device=device)
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
        """Raise this step's amax."""
        self.pending.copy_(torch.maximum(self.pending, amax))

    def start_from(self, amax: float) -> None:
        """Start from a magnitude that was measured before, so that the first step has a scale."""
        self.history.zero_()
        self.history[0] = amax
        self.largest.fill_(amax)
        self.scale.copy_(given_scale(self.largest, self.headroom, self.floor))

    def scale_for(self, spec: Spec | None, now: Tensor) -> Tensor | None:
        """Return the scale of an operand with amax `now`; None if its scale is dynamic."""
        if spec is not None and spec.mode == "static":
            return scale_from_amax(self.static * self.headroom, spec)
        return delayed_scale(spec, self.largest, now, self.headroom)

    def calibrate(self, amax: Tensor) -> None:
        """Raise the amax that static scales are computed from."""
        self.static.copy_(torch.maximum(self.static, amax))

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        for name in self._TENSORS:
            setattr(self, name, getattr(self, name).to(device))

    def state(self) -> dict[str, Tensor]:
        """Return copies of the tensors to be saved in a checkpoint. A `static` of -1 means not calibrated."""
        return {
            "history": self.history.clone(),
            "pending": self.pending.clone(),
            "static": self.static.clone() if self.calibrated else torch.full_like(self.static, -1),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned. A history of another length is truncated or padded with zeros."""
        newest = state["history"].to(self.history)[: len(self.history)]
        self.history.zero_()
        self.history[: len(newest)].copy_(newest)
        self.largest.copy_(self.history.max())
        self.scale.copy_(given_scale(self.largest, self.headroom, self.floor))
        self.pending.copy_(state["pending"])
        self.calibrated = bool(state["static"] > 0)
        self.static.copy_(state["static"].clamp(min=0))


def delayed_scale(spec: Spec | None, largest: Tensor, now: Tensor, headroom: float) -> Tensor | None:
    """Return a delayed scale, from the history or, if there is none, from the operand's amax `now`; None if dynamic."""
    if spec is None or spec.mode == "dynamic":
        return None
    return scale_from_amax(torch.where(largest > 0, largest, now) * headroom, spec)
