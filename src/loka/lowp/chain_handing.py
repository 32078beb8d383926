"""Handing on: the head has run the whole chain, and every later module of it is given the result and gives it on, in the order in which the chain was found."""

from torch import Tensor, nn

from loka.lowp.chain_function import Link
from loka.lowp.chain_parts import Part


class AnotherPathError(RuntimeError):
    """A forward took another path than the example a chain was found on.

    Args:
        text: what was seen.
        chain: the name of the chain.
    """

    def __init__(self, text: str, chain: str = "") -> None:
        super().__init__(text)
        self.chain = chain


class HandsOn:
    """Where in a chain the result is that is handed on: `_at` the link whose linear was met last, `_met` how many stops since."""

    name: str
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    pending: Tensor | None  # what is handed on, from the head's call to the last stop
    _at: int
    _met: int
    around_all: list[nn.Module]  # callers that all of it lies in
    _dropping: tuple[float, ...]  # what each link dropped in the call whose result is handed on

    def begin(self, result: Tensor) -> None:
        """The head has run the chain: `result` goes through everything that stood between its linears and behind the last. Says where the call before left something of it out."""
        if self.pending is not None:
            self._refuse_rest("in the call before this one")
        self._at = self._met = 0
        self._dropping = tuple(part.find_p() for part in self.parts)
        self.pending = result if len(self.parts) > 1 or self._stops() else None

    def meet(self, given: Tensor, *, linear: bool) -> None:
        """A later module of the chain is called. A forward that takes another path than the example did is an error, never another number."""
        if given is not self.pending or (linear and self._met != self._stops()):
            self.pending = None
            raise AnotherPathError(
                f"a module of the chain {self.name} was called with something other than what the chain made: this forward takes another path "
                "than the example the chain was found on; hint: loka.revert(model), and an example that takes this path",
                self.name,
            )
        self._at, self._met = (self._at + 1, 0) if linear else (self._at, self._met + 1)
        self._end_here()

    def meet_call(self, called: str, number: float) -> None:
        """A function is called on what is handed on: an activation with its slope, or a dropout with its p, 0 where it has no effect."""
        part, p = self.parts[self._at], self._dropping[self._at]
        link = part.link
        if called == "dropout":
            agrees = number == (p if part.drops_in_call else 0.0)
            said, has = f"a dropout with p {number:g}", f"drew one with p {p:g}"
        else:
            agrees = part.called and (called, number) == (link.activation, link.slope)
            said, has = called, f"has {link.activation}"
        if not agrees:
            self.pending = None
            raise AnotherPathError(
                f"{said} was called behind {link.linear}, where the chain {self.name} {has}: this forward takes another path "
                "than the example the chain was found on; hint: loka.revert(model), and an example that takes this path",
                self.name,
            )
        self._met += called != "dropout" or number > 0
        self._end_here()

    def leave(self, caller: nn.Module) -> None:
        """The forward of a caller is over: what it calls behind the last linear must have been called, and all of the chain where that lies inside of it."""
        if self.pending is None:
            return
        last = self._at == len(self.parts) - 1 and any(m is caller for m in self.parts[-1].callers)
        if last or any(m is caller for m in self.around_all):
            self._refuse_rest("in this call")

    def _refuse_rest(self, when: str) -> None:
        self.pending = None
        raise AnotherPathError(
            f"the chain {self.name} has computed what stood behind {self.links[self._at].linear} when it was found, and {when} the model did not call all of it: that forward took another path "
            "than the example the chain was found on, or ended in an exception; hint: loka.revert(model), and an example that takes this path",
            self.name,
        )

    def _stops(self) -> int:
        return self.parts[self._at].stops(self._dropping[self._at])

    def _end_here(self) -> None:
        if self._at == len(self.parts) - 1 and self._met == self._stops():
            self.pending = None
