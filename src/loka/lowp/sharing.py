"""One quantisation of an input that several chains of a serving model read, where a compiler would make one for each.

In training the compiler merges them itself. The graph of an inference it does not search for what is computed twice, so the first reader hands what it made to the others while the forward is
traced. Which chains read one value was found on the example (`loka.units`), values told apart by identity and version; a reader that is given another tensor quantises it itself. Eager calls share nothing.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from loka.formats import QTensor

if TYPE_CHECKING:
    from loka.lowp.chain import Chain


class SharedInput:
    """What the first of several readers made, until the last has read it.

    Args:
        readers: how many chains read the value in one forward.
    """

    def __init__(self, readers: int) -> None:
        self.readers, self.left = readers, 0
        self.given: Tensor | None = None
        self.made: QTensor | None = None

    def take(self, given: Tensor, make: Callable[[], QTensor]) -> QTensor:
        """The quantised input of one reader."""
        if self.left and self.given is given and self.made is not None:
            made, self.left = self.made, self.left - 1
        else:
            made = make()
            self.given, self.made, self.left = given, made, self.readers - 1
        if not self.left:
            self.given = self.made = None
        return made


def share_input(chains: Sequence["Chain"]) -> bool:
    """Have chains that read one value quantise it once.

    Args:
        chains: placed; each knows a calibrated scale of its input.

    Returns:
        Whether they do: their scales are the same.
    """
    inputs = [chain.input for chain in chains]
    if len(chains) < 2 or any(state is None for state in inputs):
        return False
    if len({float(state.scale) for state in inputs if state is not None}) != 1:
        return False
    shared = SharedInput(len(chains))
    for chain in chains:
        chain.input, chain.shared = chains[0].input, shared
    return True
