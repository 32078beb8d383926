"""Handing on: the head has run the whole chain, and every later module of it must be called in the order in which the chain was found; the last linear returns the result.

What is handed on until then (`StandIn`) stands for what the modules would have given: it has their shape and type and no values. Whatever computes with it is another path than the chain was
found on, a hidden state that is returned on demand for example, and raises; it never gets the chain's result in its place. torch.compile traces a tensor of NaN instead, which nothing is left of
where nothing reads it, and which shows where something does.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
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


_HINT = "this forward takes another path than the example the chain was found on; hint: loka.revert(model), and an example that takes this path"
# what may be asked of a stand-in: nothing of its values
_ASKED = {
    "shape", "size", "dim", "ndim", "numel", "dtype", "layout", "stride", "requires_grad", "is_floating_point", "is_complex", "is_sparse", "is_nested",
    "is_contiguous", "element_size", "itemsize", "__len__", "is_inference",
}  # fmt: skip


class StandIn(Tensor):
    """What a module inside of a chain hands on, until the chain's last linear: a shape and a type."""

    @classmethod
    def of(cls, result: Tensor, width: int, chain: "HandsOn") -> "StandIn":
        """One for rows of some width, of a chain with this result."""
        made = torch.empty((*result.shape[:-1], width), dtype=result.dtype, device="meta").as_subclass(cls)
        made.__dict__.update(loka_chain=chain, loka_device=result.device)
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # a checkpoint that is given nothing with a gradient would cut off the result's
            made.requires_grad_(result.requires_grad)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what has nothing to do with values; a call that would return the tensor as it is returns it; anything else raises."""
        mine = args[0] if args and isinstance(args[0], StandIn) else None
        name = getattr(getattr(func, "__self__", func), "__name__", "")  # of a property's getter it is the property's
        if mine is not None and name == "device":
            return mine.__dict__["loka_device"]
        if mine is not None and name in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if mine is not None and name in ("contiguous", "to", "float", "half", "bfloat16", "type_as") and _keeps(mine, name, args[1:], kwargs or {}):  # fmt: skip
            return mine
        found = next(_stand_ins((args, kwargs)))
        chain: HandsOn = found.__dict__["loka_chain"]
        if chain.pending is found:
            chain.forget()
        raise AnotherPathError(f"{name or func} reads what the chain {chain.name} has inside, between two of its linears: {_HINT}", chain.name)  # fmt: skip


def _stand_ins(value: Any) -> Iterator[StandIn]:
    """Those among the arguments of a function: in a list, where tensors are joined."""
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _stand_ins(part)


def _keeps(tensor: StandIn, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether a call would return the tensor as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype, device = tensor.dtype, tensor.__dict__["loka_device"]
    if name != "to":
        wanted = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "contiguous": dtype}
        return wanted.get(name, args[0].dtype if args else None) == dtype
    asked = [*args, *given.values()]
    return bool(asked) and all(a == dtype if isinstance(a, torch.dtype) else isinstance(a, str | torch.device) and torch.device(a) == device for a in asked)  # fmt: skip


class HandsOn:
    """Where in a chain the result is that is handed on: `_at` the link whose linear was met last, `_met` how many stops since."""

    name: str
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    pending: Tensor | None  # what is handed on, from the head's call to the last stop
    _result: Tensor | None  # of the whole chain, until its last linear is met
    _at: int
    _met: int
    around_all: list[nn.Module]  # callers that all of it lies in
    _dropping: tuple[float, ...]  # what each link dropped in the call whose result is handed on

    def begin(self, result: Tensor) -> Tensor:
        """The head has run the chain, and everything that stood between its linears and behind the last must be called. Says where the call before left something of it out.

        Args:
            result: of the whole chain.

        Returns:
            What the head gives.
        """
        if self.pending is not None:
            self._refuse_rest("in the call before this one")
        self._at = self._met = 0
        self._dropping = tuple(part.find_p() for part in self.parts)
        if len(self.parts) == 1 and not self._stops():
            return result
        self._result = result
        return self._pass_linear()

    def forget(self) -> None:
        """Nothing is handed on any more."""
        self.pending = self._result = None

    def _pass_linear(self) -> Tensor:
        """What the linear gives that was met last: the result behind the last one, and what stands for it before."""
        result = self._result
        assert result is not None
        if self._at == len(self.parts) - 1:
            self._result, self.pending = None, result
        else:
            width, compiling = self.parts[self._at].linear.out_features, torch.compiler.is_compiling()
            self.pending = result.new_full((*result.shape[:-1], width), math.nan) if compiling else StandIn.of(result, width, self)  # fmt: skip
        return self.pending

    def meet(self, given: Tensor, *, linear: bool) -> Tensor:
        """A later module of the chain is called, and gives what is returned. A forward that takes another path than the example did is an error, never another number."""
        if given is not self.pending or (linear and self._met != self._stops()):
            self.forget()
            raise AnotherPathError(
                f"a module of the chain {self.name} was called with something other than what the chain made: {_HINT}",
                self.name,
            )
        self._at, self._met = (self._at + 1, 0) if linear else (self._at, self._met + 1)
        handed = self._pass_linear() if linear else given
        self._end_here()
        return handed

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
            self.forget()
            raise AnotherPathError(
                f"{said} was called behind {link.linear}, where the chain {self.name} {has}: {_HINT}",
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
        self.forget()
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
