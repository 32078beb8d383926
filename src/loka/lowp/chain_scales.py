"""The scales of a chain, between its layers and of its gradients: remembered from step to step, calibrated for serving, or made from magnitudes that were measured before."""

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

PATIENCE = 8  # steps after which a chain asks more rarely whether its scales are known
UNFILED = 256  # calls in training without a step, after which a chain files its magnitudes itself: more than anybody accumulates


class ChainScales:
    """The layers of a chain, and what their outputs and gradients are scaled by.

    Args:
        config: what it is made of.
    """

    shared: "SharedInput | None" = None  # with chains that read the same tensor, in serving
    reads: int | None = None  # which tensor of an example it reads: chains with the same number read the same
    given: "list[tuple[Tensor, int]] | None" = (
        None  # while inputs are noted: what it was given, and how often that had been written to
    )

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
        self.input: AmaxState | None = None  # a calibrated scale of x, for serving; None: from x itself, or bounded
        self.bounds = [self.static.clone() for _ in self.links]  # one a link: a compiler takes no tensor twice
        self.primed, self.gradients_primed = (all(s is None for s in states) for states in (self.out, self.grad))
        self._asked = 0  # steps after which scales were still not known
        self._unfiled = 0  # calls in training since magnitudes were filed
        self._told = False

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.linears[0].weight.device

    @property
    def training(self) -> bool:
        """As its head."""
        return self.linears[0].training

    @property
    def remembered(self) -> list[AmaxState]:
        """The magnitudes that its scales come from."""
        return [state for state in (*self.out, *self.grad) if state is not None]

    @property
    def input_scale(self) -> Tensor | None:
        """The scale of x that is known before x comes; None: it is found from x."""
        if self.bounded_input:
            return self.static
        return None if self.input is None else self.input.scale

    def fix_input(self, amax: float) -> None:
        """Give the input a scale for the largest magnitude that calibration saw: serving needs no pass over x to find one."""
        self.input = AmaxState(self.scaling, self.device)
        self.input.start_from(amax)

    def start_from(self, magnitudes: Mapping[str, Magnitude]) -> bool:
        """Take the first scales from magnitudes that were measured before.

        Args:
            magnitudes: by the linear's name.

        Returns:
            Whether all were there, so that the first step runs as all others will.
        """
        for link, out, grad in zip(self.links, self.out, self.grad, strict=True):
            known = magnitudes.get(link.linear, Magnitude(output=0.0))
            for state, amax in ((out, known.output), (grad, known.gradient)):
                if state is not None and amax > 0:
                    state.start_from(amax)
        self.find_primed()
        return self.primed and self.gradients_primed

    def find_primed(self) -> None:
        """Whether all scales are known, forward and backward. Waits for the device."""
        self.primed, self.gradients_primed = (
            all(bool(s.largest > 0) for s in states if s is not None) for states in (self.out, self.grad)
        )

    def after_step(self) -> None:
        """Called when a step's magnitudes are filed. Waits for the device until all scales are known, and never again; ever more rarely where none come, as behind a detach."""
        self._unfiled = 0
        if self.primed and self.gradients_primed:
            return
        self._asked += 1
        if self._asked > PATIENCE and self._asked & (self._asked - 1) and self._asked % 256:
            return
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.find_primed()

    def notice_unfiled(self) -> None:
        """Count a call in training; where no optimizer ever steps, say so once and file what was seen, so that scales do not stay those of the first step."""
        if not self.remembered or not (self.training and torch.is_grad_enabled()):
            return
        self._unfiled += 1
        if self._unfiled < UNFILED or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        if not self._told:
            self._told = True
            warnings.warn(f"{self.name}: {UNFILED} calls in training and no step of a torch optimizer, so its scales stayed those of the first; they follow now, every {UNFILED} calls; hint: loka.refresh(model) after every update of the weights", stacklevel=2)  # fmt: skip
        file_amax(self.remembered)
        self.after_step()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Batches run in this block set the scales between layers; one that ends in an exception changes nothing."""
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
        """Follow the parameters."""
        for state in (*self.remembered, *([] if self.input is None else [self.input])):
            state.to(device)
        self.static, self.bounds = self.static.to(device), [bound.to(device) for bound in self.bounds]
