"""An input that several chains of a serving model read, quantised once.

Experts, projections, a gate and what it gates: in recommenders many linears read one tensor. Each chain quantises its input, with the scale that calibration found, which for one tensor is one
scale. In training a compiler sees that they do the same; in inference it does not, and writes a copy for every reader (six experts that read 8,192 x 1,536 on an H200: 46 us instead of 33).

So chains that read one tensor share its scale, and the module that holds these chains remembers, while its forward is compiled, the last tensor one of them has quantised. Only the very same tensor is
taken from there. Which chains read one tensor, and that nothing is written to it between them, an example shows (`noting_inputs`; `convert` runs it): in compiled code not every write can be seen. What is seen there
to write makes it forget, too. In eager mode nothing is shared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.formats import QTensor
from loka.lowp.chain import Chain, chains_of
from loka.nn.mixing import mix, unmix
from loka.nn.writing import writes

SHARED = "loka_shared_inputs"  # on the module that holds the chains: what they share


class SharedInput:
    """What chains with one scale have quantised last, while the forward around them is compiled."""

    def __init__(self) -> None:
        self.open = False
        self.x: Tensor | None = None
        self.quantized: QTensor | None = None

    def begin(self) -> None:
        """The forward around the chains begins."""
        self.forget()
        self.open = True

    def end(self) -> None:
        """It is over."""
        self.open = False
        self.forget()

    def forget(self) -> None:
        """What was quantised may not be what it was."""
        self.x = self.quantized = None

    def find(self, x: Tensor) -> QTensor | None:
        """This very tensor quantised, where one of the chains has done it."""
        return self.quantized if self.open and torch.compiler.is_compiling() and self.x is x else None

    def keep(self, x: Tensor, quantized: QTensor) -> None:
        """For the next chain that reads it."""
        if self.open and torch.compiler.is_compiling():
            self.x, self.quantized = x, quantized


class _ForgetWritten(TorchFunctionMode):
    """Forgets what is shared where something is written in place."""

    def __init__(self, shared: Sequence[SharedInput]) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if writes(func, args, kwargs):
            for shared in self.shared:
                shared.forget()
        return out


class _Sharing(nn.Module):
    """Mixed in front of the module that holds the chains."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Its own."""
        if not torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        shared = self.__dict__[SHARED]
        for one in shared:
            one.begin()
        try:
            with _ForgetWritten(shared):
                return super().forward(*args, **kwargs)
        finally:
            for one in shared:
                one.end()


@contextmanager
def noting_inputs(model: nn.Module) -> Iterator[None]:
    """Run an example in this block, in eager mode: chains that are given the same tensor, unchanged, may share it once the model serves.

    Args:
        model: with chains, not wrapped.

    Returns:
        A context manager.
    """
    chains = [chain for _, chain in chains_of(model)]
    for chain in chains:
        chain.reads, chain.given = None, []
    try:
        yield
        seen: list[tuple[Tensor, int]] = []
        for chain in chains:
            if chain.given is None or len(chain.given) != 1:  # not called, or called more often than once
                continue
            mine = chain.given[0]
            places = [at for at, other in enumerate(seen) if other[0] is mine[0] and other[1] == mine[1]]
            chain.reads = places[0] if places else len(seen)
            seen.append(mine)
    finally:
        for chain in chains:
            chain.given = None


def share_inputs(model: nn.Module) -> list[tuple[str, ...]]:
    """Let chains that read one tensor quantise it once.

    Args:
        model: with chains, not wrapped; changed in place.

    Returns:
        The names of the chains that share, group by group.
    """
    unshare_inputs(model)
    groups: dict[tuple[int, float, torch.device], list[tuple[str, Chain]]] = {}
    for name, chain in chains_of(model):
        if chain.reads is not None and chain.input is not None and not chain.bounded_input:
            groups.setdefault((chain.reads, float(chain.input.largest), chain.device), []).append((name, chain))
    found = [group for group in groups.values() if len(group) > 1]
    for group in found:
        shared, first = SharedInput(), group[0][1]
        for _, chain in group:
            chain.input, chain.shared = first.input, shared
        holder = _holder(model, [name for name, _ in group])
        if SHARED not in holder.__dict__:
            holder.__dict__[SHARED] = []
            holder.__class__ = mix(type(holder), _Sharing)
        holder.__dict__[SHARED].append(shared)
    return [tuple(name for name, _ in group) for group in found]


def could_share(model: nn.Module) -> bool:
    """Whether two chains have the same calibrated scale of their inputs, which is to say that they probably read one tensor.

    Args:
        model: with chains, not wrapped.
    """
    scales = [float(chain.input.largest) for _, chain in chains_of(model) if chain.input is not None]
    return len(set(scales)) < len(scales)


def unshare_inputs(model: nn.Module) -> None:
    """The inverse; scales stay what they are.

    Args:
        model: as `share_inputs` left it.
    """
    for module in model.modules():
        if module.__dict__.pop(SHARED, None) is not None:
            module.__class__ = unmix(type(module), _Sharing)
    for _, chain in chains_of(model):
        chain.shared = None


def _holder(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The innermost module that holds them all and has a forward."""
    common = names[0].split(".")[:-1]
    for name in names[1:]:
        parts = name.split(".")
        while parts[: len(common)] != common:
            common.pop()
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()
    return model.get_submodule(".".join(common))
