"""The scales of a chain's activations and gradients: remembered between steps, calibrated, or taken from a plan."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka.kernels.amax_history import file_amax
from loka.kernels.fused_linear import NORMALIZED_SCALE
from loka.lowp.chain_parts import ChainConfig
from loka.lowp.scaling import AmaxState
from loka.records import Magnitude

if TYPE_CHECKING:
    from loka.lowp.shared_inputs import SharedInput

PATIENCE = 8  # steps after which a chain checks less often whether its scales are known
UNFILED = 256  # training calls without an optimizer step after which a chain files its magnitudes itself


class ChainScales:
    """The layers of a chain, and the scales of their outputs and gradients."""

    shared: "SharedInput | None" = None  # shared with chains that read the same tensor, in serving
    reads: int | None = None  # chains with the same number read the same tensor
    steps_in_eval = False  # whether the last step ended in eval mode, as with a frozen trunk, or dropout switched off
    given: "list[tuple[Tensor, int]] | None" = None  # while inputs are recorded: each input and its version

    def __init__(self, config: ChainConfig) -> None:
        self.name, self.parts, self.precision = config.name, config.parts, config.precision
        self.bounded_input, self.scaling = config.bounded_input, config.scaling
        self.links = tuple(part.link for part in self.parts)
        self.linears = tuple(part.linear for part in self.parts)
        device, scaling, last = self.device, config.scaling, len(self.parts) - 1
        self.out = [
            None if i == last or link.bounded else AmaxState(scaling, device, floor=link.floor)
            for i, link in enumerate(self.links)
        ]
        delayed = self.precision.gradient == "delayed"
        self.grad = [AmaxState(scaling, device) if delayed else None for _ in self.links]
        self.static = torch.full((), NORMALIZED_SCALE, device=device)
        self.input: AmaxState | None = None  # a calibrated scale of x; None if bounded or computed from x
        self.bounds = [
            self.static.clone() for _ in self.links
        ]  # one per link: a compiled graph must not get one tensor twice
        self.primed, self.gradients_primed = (all(s is None for s in states) for states in (self.out, self.grad))
        self._asked = 0  # steps after which the scales were still unknown
        self._unfiled = 0  # training calls since magnitudes were filed
        self._told = False  # whether `notice_unfiled` has warned

    @property
    def device(self) -> torch.device:
        """The device of the first weight."""
        return self.linears[0].weight.device

    @property
    def training(self) -> bool:
        """Whether the first linear is in training mode."""
        return self.linears[0].training

    @property
    def remembered(self) -> list[AmaxState]:
        """The amax states that the scales come from."""
        return [state for state in (*self.out, *self.grad) if state is not None]

    @property
    def input_scale(self) -> Tensor | None:
        """The scale of x if it is known beforehand; None if it is computed from x."""
        if self.bounded_input:
            return self.static
        return None if self.input is None else self.input.scale

    def fix_input(self, amax: float) -> None:
        """Fix the scale of the input, so that serving needs no amax pass over it."""
        self.input = AmaxState(self.scaling, self.device)
        self.input.start_from(amax)

    def start_from(self, magnitudes: Mapping[str, Magnitude]) -> bool:
        """Take the first scales from magnitudes that were measured before.

        Args:
            magnitudes: by the linear's name.

        Returns:
            Whether none was missing, so that the first step runs like all others.
        """
        for link, out, grad in zip(self.links, self.out, self.grad, strict=True):
            known = magnitudes.get(link.linear, Magnitude(output=0.0))
            for state, amax in ((out, known.output), (grad, known.gradient)):
                if state is not None and amax > 0:
                    state.start_from(amax)
        self.find_primed()
        return self.primed and self.gradients_primed

    def find_primed(self) -> None:
        """Update `primed` and `gradients_primed`: whether all scales are known. Synchronizes with the device."""
        self.primed, self.gradients_primed = (
            all(bool(s.largest > 0) for s in states if s is not None) for states in (self.out, self.grad)
        )

    def steps(self) -> Tensor:
        """Return what the chain remembers of its steps besides magnitudes, to be saved in a checkpoint."""
        return torch.tensor([self.steps_in_eval, self._asked, self._unfiled])

    def load_steps(self, steps: Tensor) -> None:
        """Restore what `steps` returned."""
        in_eval, self._asked, self._unfiled = (int(one) for one in steps)
        self.steps_in_eval = bool(in_eval)

    def after_step(self) -> None:
        """Check whether all scales are known now, after a step's magnitudes were filed.

        This synchronizes with the device only until all are known, and less and less often if that does not happen, as
        for gradients before a detach.
        """
        self._unfiled, self.steps_in_eval = 0, not self.training
        if self.primed and self.gradients_primed:
            return
        self._asked += 1
        if self._asked > PATIENCE and self._asked & (self._asked - 1) and self._asked % 256:
            return
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.find_primed()

    def notice_unfiled(self) -> None:
        """Count training calls.

        If no optimizer ever steps, warn once and file magnitudes, or scales would never change.
        """
        if not self.remembered or not (self.training and torch.is_grad_enabled()):
            return
        self._unfiled += 1
        if self._unfiled < UNFILED or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        if not self._told:
            self._told = True
            warnings.warn(
                (
                    f"{self.name}: {UNFILED} calls in training without a torch optimizer step, so its scales did not "
                    f"change; they are updated every {UNFILED} calls now; hint: loka.refresh(model) after every update of "
                    "the weights"
                ),
                stacklevel=2,
            )
        file_amax(self.remembered)
        self.after_step()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Set the scales between layers from the batches run in this block.

        If it raises, the old scales are restored.
        """
        states = [state for state in self.out if state is not None]
        before, primed = [state.state() for state in states], self.primed
        self.primed = not states
        for state in states:
            state.pending.zero_()
        try:
            yield
            seen = [float(state.pending) for state in states]
            if not all(seen):
                raise ValueError(
                    f"calibration saw no finite value other than zero in the chain {self.name}; run more batches"
                )
            for state, amax in zip(states, seen, strict=True):
                state.start_from(amax)
                state.pending.zero_()
            self.primed = True
        except BaseException:
            for state, old in zip(states, before, strict=True):
                state.load(old)
            self.primed = primed
            raise

    def to(self, device: torch.device) -> None:
        """Move the scales to a device."""
        for state in (*self.remembered, *([] if self.input is None else [self.input])):
            state.to(device)
        self.static, self.bounds = self.static.to(device), [bound.to(device) for bound in self.bounds]
