"""Pass a chain's result from its head, which has computed it, to its last linear, which returns it.

In between, the modules of the chain must be called in the order in which the chain was found. They pass on a
placeholder (`StandIn`) with the shape and dtype of the original output and no values. Computing with it means that the
forward takes a different path than the example, such as returning a hidden state on demand, and raises; it never
silently uses the chain's result. Under torch.compile the placeholder is a tensor of NaN, which is eliminated if nothing
reads it and shows up in the output if something does.
"""

import math
from collections.abc import Iterator
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor
from loka.lowp.chain_function import Link
from loka.lowp.chain_parts import Part
from loka.lowp.passing import is_in_place, spell_call
from loka.nn.replacing import every_module_is_watched, is_watched


class AnotherPathError(RuntimeError):
    """A forward took a different path than the example that a chain was found on.

    Args:
        text: what was seen.
        chain: the name of the chain.
    """

    def __init__(self, text: str, chain: str = "") -> None:
        super().__init__(text)
        self.chain = chain


_HINT = (
    "this forward takes another path than the example the chain was found on; "
    "hint: loka.revert(model), and an example that takes this path"
)
_HOOKS_HINT = (
    "hooks are registered for all modules at once, as by torch's FlopCounterMode, and may be what reads it; "
    "hint: use them before loka.convert, or after loka.revert(model)"
)
# attributes and methods of a stand-in that do not depend on its values
_METADATA = {
    "shape", "size", "dim", "ndim", "numel", "dtype", "layout", "stride", "requires_grad", "is_floating_point", "is_complex", "is_sparse", "is_nested",
    "is_contiguous", "element_size", "itemsize", "__len__", "is_inference", "is_same_size",
}  # fmt: skip


class StandIn(Tensor):
    """A placeholder with a shape and a dtype, which modules inside a chain return; its values must not be read.

    Between two linears it is on the meta device. After the last linear, if an activation is still to come, it holds the
    result, so that autograd (a reentrant checkpoint, for example) can attach the result's history to it.
    """

    @classmethod
    def of(cls, result: Tensor, width: int, chain: "HandsOn") -> "StandIn":
        """Return a stand-in between two linears, with the rows of `result` and the given width."""
        made = torch.empty((*result.shape[:-1], width), dtype=result.dtype, device="meta").as_subclass(cls)
        made._note(result, chain)
        with torch._C.DisableTorchFunctionSubclass():
            # a checkpoint whose inputs need no gradient would cut off the result's
            made.requires_grad_(result.requires_grad)
        return made

    @classmethod
    def before(cls, result: Tensor, chain: "HandsOn") -> "StandIn":
        """Return a stand-in for the output of the last linear, while computed calls are still to come."""
        made = result.as_subclass(cls)
        made._note(result, chain)
        return made

    def _note(self, result: Tensor, chain: "HandsOn") -> None:
        here = chain.position
        place = {"loka_at": here.at, "loka_dropping": here.dropping}
        self.__dict__.update(loka_chain=chain, loka_device=result.device, loka_result=result, **place)

    def become_result(self) -> None:
        """Turn a stand-in that holds the result into an ordinary tensor, in place."""
        for key in ("loka_chain", "loka_device", "loka_result", "loka_at", "loka_dropping"):
            del self.__dict__[key]
        self.__class__ = Tensor  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer metadata queries, skip calls that the chain has computed or that change nothing, else raise."""
        kwargs = kwargs or {}
        found = next(_stand_ins((args, kwargs)))
        chain: HandsOn = found.__dict__["loka_chain"]
        mine = args[0] if args and isinstance(args[0], StandIn) else None
        name = getattr(func, "__name__", "")
        if name == "__get__":  # the getter of a property
            name = func.__self__.__name__
        if mine is not None and name == "device":
            return mine.__dict__["loka_device"]
        # A reentrant checkpoint that ends in front of the last activation calls backward on what it recomputed.
        if (mine is not None and name in _METADATA) or (name == "backward" and chain.ends_with(found)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            mine is not None
            and name in ("contiguous", "to", "float", "half", "bfloat16", "type_as")
            and _keeps(mine, name, args[1:], kwargs)
        ):
            return mine
        called = spell_call(func, args, kwargs)
        if called is not None and chain.goes_on_with(mine if args else kwargs.get("input")):
            # recomputed by a checkpoint, outside of the forward that the mode of `loka.lowp.passing` surrounds
            return chain.meet_call(*called, in_place=is_in_place(func, args, kwargs))
        if chain.pending is found:
            chain.forget()
        raise AnotherPathError(
            f"{name or func} reads a value inside the chain {chain.name}, which does not keep it: {chain.hint_reader()}",
            chain.name,
        )


def _stand_ins(value: Any) -> Iterator[StandIn]:
    """Yield the stand-ins among the arguments of a function, also those in lists (torch.cat)."""
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _stand_ins(part)


def _keeps(tensor: StandIn, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Check whether a call would return the tensor unchanged."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype, device = tensor.dtype, tensor.__dict__["loka_device"]
    if name != "to":
        wanted = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "contiguous": dtype}
        return wanted.get(name, args[0].dtype if args else None) == dtype
    asked = [*args, *given.values()]
    return bool(asked) and all(
        a == dtype if isinstance(a, torch.dtype) else isinstance(a, str | torch.device) and torch.device(a) == device
        for a in asked
    )


class Position(local):
    """How far the calling thread has come in a chain: what is passed on, and which modules were called since its head.

    Every thread sees its own values, so several may call a model at the same time. That includes compiled code whose graph
    ends inside a chain: torch's compiler follows a `threading.local`, and its code reads and writes that of the thread that
    runs it. It can do so while the class has no __dict__ of its own, no defaults, and no methods that a forward calls.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self.pending: Tensor | None = None  # what is passed on, from the head's call to the last one expected
        self.result: Tensor | None = None  # of the whole chain, until it is returned
        self.at = 0  # the link whose linear was called last
        self.met = 0  # how many modules and functions were called since
        self.grad = False  # whether gradients were enabled when the head ran
        self.recomputing = False  # whether the head was called by a checkpoint's backward, which stops where it likes
        self.dropping: tuple[float, ...] = ()  # p of each link's dropout in this call

    def __reduce__(self) -> Any:
        return Position, ()  # a copy of a model is in no call


class HandsOn:
    """Passes on the result of a chain, in each call of it."""

    name: str
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    frozen: list[QTensor] | None  # the quantized weights of a serving model, which have no gradients
    position: Position
    around_all: list[nn.Module]  # callers that contain the whole chain

    @property
    def pending(self) -> Tensor | None:
        """What the call that is running passes on; None before its head and after its last module."""
        return self.position.pending

    def begin(self, result: Tensor) -> Tensor:
        """Start to expect the later modules of the chain. Raise if the previous call left some of them out.

        Args:
            result: the result of the whole chain.

        Returns:
            What the head returns.
        """
        here = self.position
        if here.pending is not None and not here.recomputing:
            self._refuse_rest(here, "in the call before this one")
        here.recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        here.pending = None  # of a backward that stopped inside of the chain
        here.at = here.met = 0
        here.grad = torch.is_grad_enabled()
        here.dropping = tuple(part.find_p() for part in self.parts)
        if len(self.parts) == 1 and not self._stops(here):
            return result
        here.result = result
        return self._pass_linear(here)

    def forget(self) -> None:
        """Stop passing on the chain's result, in the call that is running."""
        _forget(self.position)

    def hint_reader(self) -> str:
        """Return what probably reads a value inside the chain, and what to do about it."""
        if every_module_is_watched():
            return _HOOKS_HINT
        for part in self.parts:
            if any(is_watched(module) for module in (part.linear, *part.passed)):
                return (
                    f"{part.link.linear}, or a module after it, was given hooks since it was converted, and these may "
                    "be what reads it; hint: remove them; or loka.revert(model), and a new plan, which ends the chain there"
                )
        return _HINT

    def goes_on_with(self, given: Tensor | None) -> bool:
        """Return True if this is what the chain passes on.

        A checkpoint that begins inside the chain runs that part again in backward, with the stand-in of the forward
        before it. The chain is then taken up behind that stand-in, which holds the result. On a GPU another thread does this.
        """
        here = self.position
        if given is here.pending:
            return True
        held = given.__dict__ if isinstance(given, StandIn) else {}
        if held.get("loka_chain") is not self or torch._C._current_graph_task_id() == -1:
            return False
        here.pending, here.result, here.at, here.met = given, held["loka_result"], held["loka_at"], 0
        here.grad, here.recomputing, here.dropping = torch.is_grad_enabled(), True, held["loka_dropping"]
        return True

    def ends_with(self, stand_in: StandIn) -> bool:
        """Return True if the stand-in is the output of the last linear, which holds the result."""
        here = self.position
        return stand_in is here.pending and here.at == len(self.parts) - 1

    def _pass_linear(self, here: Position) -> Tensor:
        """Return the output of the linear that was just called: the result if nothing follows, otherwise a stand-in."""
        result, last = _held(here.result), here.at == len(self.parts) - 1
        if last and not self._stops(here):
            _forget(here)
            return result
        width = self.parts[here.at].linear.out_features
        # torch's compiler leaves a frame without operations to eager code, which goes on with what its graphs can take
        if torch.compiler.is_compiling() or type(here.pending) is Tensor:
            here.pending = result.new_full((*result.shape[:-1], width), math.nan)
        else:
            here.pending = StandIn.before(result, self) if last else StandIn.of(result, width, self)
        return here.pending

    def meet(self, given: Tensor, *, linear: bool, in_place: bool = False) -> Tensor:
        """Return the output of a later module of the chain. Raise if the forward takes another path than the example.

        Args:
            given: the module's input, which must be what the chain passed on.
            linear: whether the module is one of the chain's linears.
            in_place: whether the module writes to its input.
        """
        here = self.position
        followed = given is here.pending  # not so in a checkpoint, whose first run has checked what it calls
        if not self.goes_on_with(given) or (linear and followed and here.met != self._stops(here)):
            _forget(here)
            raise AnotherPathError(
                f"a module of the chain {self.name} was called with something other than the chain's output: {_HINT}",
                self.name,
            )
        if linear:
            here.at, here.met = here.at + 1, 0
            self._check_gradients(here, self.links[here.at].linear)
            return self._pass_linear(here)
        here.met += 1
        return self._hand_on(here, in_place)

    def meet_call(self, called: str, number: float, *, in_place: bool = False) -> Tensor:
        """Return the output of a function that is called on what the chain passed on.

        Args:
            called: "dropout", or the activation's name.
            number: the dropout's effective p, or the activation's slope.
            in_place: whether it writes to its input.
        """
        here = self.position
        part, p = self.parts[here.at], here.dropping[here.at]
        link = part.link
        if called == "dropout":
            agrees = number == (p if part.drops_in_call else 0.0)
            said, has = f"a dropout with p {number:g}", f"drew one with p {p:g}"
        else:
            agrees = part.called and (called, number) == (link.activation, link.slope)
            said, has = called, f"has {link.activation}"
        if not agrees:
            _forget(here)
            raise AnotherPathError(
                f"{said} was called after {link.linear}, where the chain {self.name} {has}: {_HINT}",
                self.name,
            )
        here.met += called != "dropout" or number > 0
        return self._hand_on(here, in_place)

    def _hand_on(self, here: Position, in_place: bool) -> Tensor:
        """Return the result after the last expected call of the chain, and what was passed on before it."""
        handed, result = _held(here.pending), _held(here.result)
        last = here.at == len(self.parts) - 1
        # the last call decides itself whether its result has a history, but for one that writes to its input
        if not last or (in_place and here.grad):
            self._check_gradients(here, f"what follows {self.links[here.at].linear}")
        if not last or here.met < self._stops(here):
            return handed
        _forget(here)
        if isinstance(handed, StandIn):
            if in_place:  # a forward may go on with what it gave to the activation: it is the result from now on
                handed.become_result()
                return handed
            with torch._C.DisableTorchFunctionSubclass():
                return handed.as_subclass(Tensor)  # not `result`: the history may have been attached to the stand-in
        if in_place:
            return handed.copy_(result)
        return result if torch.is_grad_enabled() else result.detach()

    def _check_gradients(self, here: Position, called: str) -> None:
        """Raise if gradients were enabled or disabled since the head ran, and some would be lost or added by that."""
        if torch.is_grad_enabled() == here.grad:
            return
        result = _held(here.result)
        trains = self.frozen is None and any(p.requires_grad for part in self.parts for p in part.linear.parameters())
        if result.requires_grad if here.grad else trains:
            _forget(here)
            now, before = ("disabled", "enabled") if here.grad else ("enabled", "disabled")
            raise AnotherPathError(
                f"gradients are {now} for {called}, but were {before} for the head of the chain {self.name}, which has "
                "computed it: torch.no_grad or a reentrant checkpoint contains only a part of the chain, which it did not "
                "in the example; hint: let it contain all of the chain or nothing of it, or plan with such an example",
                self.name,
            )

    def leave(self, caller: nn.Module) -> None:
        """Handle the end of a caller's forward. Raise if it left out calls that only it could have made."""
        here = self.position
        if here.pending is None:
            return
        last = here.at == len(self.parts) - 1 and any(m is caller for m in self.parts[-1].callers)
        if last or any(m is caller for m in self.around_all):
            self._refuse_rest(here, "in this call")

    def _refuse_rest(self, here: Position, when: str) -> None:
        _forget(here)
        raise AnotherPathError(
            f"the chain {self.name} has computed what followed {self.links[here.at].linear} in the example, but "
            f"{when} the model did not call all of it: that forward took another path than the example the chain was "
            "found on, or ended in an exception; hint: loka.revert(model), and an example that takes this path",
            self.name,
        )

    def _stops(self, here: Position) -> int:
        return self.parts[here.at].stops(here.dropping[here.at])


def _forget(here: Position) -> None:
    here.pending = here.result = None


def _held(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # the head has set it, and only the last call takes it away
    return tensor
