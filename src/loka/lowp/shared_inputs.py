"""Quantize an input that several chains of a serving model read only once.

In recommenders many linears read one tensor: experts, projections, a gate and what it gates. Each chain quantizes its
input, with the same calibrated scale. In training a compiler merges these quantizations; in inference it does not, and
writes a copy per reader (six experts that read 8,192 x 1,536 on an H200: 46 us instead of 33).

So chains that read one tensor share its scale, and while the forward of the module that contains them is compiled, that
module remembers the last tensor quantized by one of them, and reuses it only for exactly that tensor. An example shows
which chains read one tensor, and that nothing writes to it in between (`noting_inputs`, run by `convert`), because in
compiled code not every write is visible; those that are discard the copy as well. In eager mode nothing is shared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor
from loka.lowp.chain import Chain, chains_of
from loka.nn.mixing import mix, unmix
from loka.nn.sharing import Shared, is_valid, run_sharing, take_stamp
from loka.nn.wrapping import find_holder

SHARED = "loka_shared_inputs"  # attribute of the module that contains the chains: its SharedInputs


class SharedInput(Shared):
    """The tensor that chains with a common scale quantized last, while the forward around them is compiled."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.quantized: QTensor | None = None
        self.stamp = ""

    def forget(self) -> None:
        """Discard the quantized tensor, whose source may have changed."""
        self.x = self.quantized = None

    def find(self, x: Tensor) -> QTensor | None:
        """Return the quantized copy of exactly this tensor, if a chain has made one."""
        shares = self.open and torch.compiler.is_compiling() and self.x is x
        return self.quantized if shares and is_valid(self.stamp) else None

    def keep(self, x: Tensor, quantized: QTensor) -> None:
        """Keep a quantized tensor for the next chain that reads it."""
        if self.open and torch.compiler.is_compiling():
            self.x, self.quantized, self.stamp = x, quantized, take_stamp()


class _Sharing(nn.Module):
    """Mixed in before the class of the module that contains the chains."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with sharing, if it is being compiled."""
        return run_sharing(self.__dict__[SHARED], super().forward, *args, **kwargs)


@contextmanager
def noting_inputs(model: nn.Module) -> Iterator[None]:
    """Record which chains read the same unchanged tensor, in a block that runs an example in eager mode.

    `share_inputs` lets these share it. `model` must be unwrapped.
    """
    chains = [chain for _, chain in chains_of(model)]
    for chain in chains:
        chain.reads, chain.given = None, []
    try:
        yield
        seen: list[tuple[Tensor, int]] = []
        for chain in chains:
            if chain.given is None or len(chain.given) != 1:  # not called, or called more than once
                continue
            mine = chain.given[0]
            places = [at for at, other in enumerate(seen) if other[0] is mine[0] and other[1] == mine[1]]
            chain.reads = places[0] if places else len(seen)
            seen.append(mine)
    finally:
        for chain in chains:
            chain.given = None


def share_inputs(model: nn.Module) -> list[tuple[str, ...]]:
    """Let chains that read one tensor share its quantized copy, in place.

    Args:
        model: unwrapped, after `noting_inputs`.

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
        holder = model.get_submodule(find_holder([name for name, _ in group], model))
        if SHARED not in holder.__dict__:
            holder.__dict__[SHARED] = []
            holder.__class__ = mix(type(holder), _Sharing)
        holder.__dict__[SHARED].append(shared)
    return [tuple(name for name, _ in group) for group in found]


def could_share(model: nn.Module) -> bool:
    """Check whether two chains have the same calibrated input scale, so that they probably read the same tensor."""
    scales = [float(chain.input.largest) for _, chain in chains_of(model) if chain.input is not None]
    return len(set(scales)) < len(scales)


def unshare_inputs(model: nn.Module) -> None:
    """Undo `share_inputs`; scales are not changed."""
    for module in model.modules():
        if module.__dict__.pop(SHARED, None) is not None:
            module.__class__ = unmix(type(module), _Sharing)
    for _, chain in chains_of(model):
        chain.shared = None
