"""fused_dots: pairwise products of feature vectors, written with torch, run in one kernel.

    torch.bmm(x, x.transpose(1, 2))[:, i, j]        ->        loka.kernels.dots(x, i, j)

The first writes n x n products of every example (27 x 27, which no fast GEMM is aligned for) and then gathers half of them. Recognised by what the example shows, a batch product of a tensor with
its own transpose that is read by an index alone, in whichever module it stands and whatever it is called.

The forward stays the user's. While it runs, a torch function mode looks at three operations: a transpose of the last two dimensions, a batch product of a tensor with its transpose, and an index of
that product by two index tensors; the third returns the kernel's result. Compiled, the product that nobody reads is never computed; a transpose spelled `x.mT` is not seen there and stays torch's. Sums are in another order: rounding.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.kernels.dots.call import DTYPES
from loka.kernels.dots.pairs import find_fault
from loka.mods.editor import Editor
from loka.nn.mix import multiply_pairs
from loka.nn.writing import writes
from loka.records.mods import ModClass
from loka.units.example import call_model
from loka.units.flow import Call, Flow
from loka.units.undisturbed import undisturbed

_TURNS = (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
_VIEWS = ("expand", "view", "_unsafe_view", "reshape", "_reshape_alias")
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_PRODUCTS = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Looking(TorchFunctionMode):
    """Returns the pairwise products where their index is asked for. A write in place forgets what was seen: the product may not be x's any more."""

    def __init__(self, *, use: bool = True) -> None:
        super().__init__()
        self.use = use  # False: only look
        self.faults: list[str] = []  # of pairs that the kernel cannot take
        self.turned: list[tuple[Tensor, Tensor]] = []
        self.products: list[tuple[Tensor, Tensor]] = []
        self.joined: list[tuple[Tensor, Tensor, Tensor]] = []  # a concatenation of two, and both

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and self.products:
            found = self._asked(args[0], args[1])
            if found is not None:
                return found
        out = func(*args, **kwargs)
        if writes(func, args, kwargs):
            if self.turned:  # an empty list is left alone: nothing may be written from inside of an autograd function that is compiled
                self.turned.clear()
            if self.products:
                self.products.clear()
            if self.joined:
                self.joined.clear()
        elif is_transpose(func, args):
            self.turned.append((out, args[0]))
        elif func in _JOINS and _joins_two(out, args, kwargs):
            self.joined.append((out, args[0][0], args[0][1]))
        elif func in _PRODUCTS and len(args) == 2:
            for turned, x in self.turned:
                if args[1] is turned and args[0] is x:
                    self.products.append((out, x))
        return out

    def _asked(self, value: Any, index: Any) -> Tensor | None:
        if not isinstance(index, tuple) or len(index) != 3 or not isinstance(index[0], slice):
            return None
        first, second = index[1], index[2]
        if index[0] != slice(None) or not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        for product, x in self.products:
            if value is product:
                if not self._takes(x, first, second) or not self.use:
                    return None
                for made, head, rest in () if torch.is_grad_enabled() else self.joined:
                    if made is x:  # nobody else may read the concatenation, and then it is never written
                        return multiply_pairs(rest, first, second, head)
                return multiply_pairs(x, first, second)
        return None

    def _takes(self, x: Tensor, first: Tensor, second: Tensor) -> bool:
        """Whether the kernel multiplies these as the index would. Compiled code cannot see the values of indices: the example was looked at before."""
        if torch.compiler.is_compiling():
            return _suits(x, first, second)
        fault = find_fault(first, second, x.shape[1])
        if fault is None and not _suits(x, first, second):
            fault = f"vectors of {x.dtype} on {x.device}, indices on {first.device} and {second.device}"
        if fault is not None:
            self.faults.append(fault)
        return fault is None


def _suits(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the kernel takes these, as far as can be said without the values of the indices."""
    if x.dtype not in DTYPES or first.device != x.device or second.device != x.device:
        return False
    if any(index.dim() != 1 or index.dtype != torch.int64 for index in (first, second)):
        return False
    return first.shape == second.shape and first.shape[0] <= x.shape[1] ** 2


def _joins_two(out: Any, args: Any, kwargs: Any) -> bool:
    """Whether it was a concatenation of two batches of vectors of one type, along the vectors."""
    dim = args[1] if len(args) == 2 else kwargs.get("dim", 0)
    if not isinstance(args[0], (tuple, list)) or len(args[0]) != 2 or out.dim() != 3 or dim not in (1, -2):
        return False
    return bool(args[0][0].dtype == args[0][1].dtype)


def is_transpose(func: Any, args: Any) -> bool:
    """Whether a function turns the last two dimensions of a batch of matrices."""
    if func in _TURNS:
        return len(args) == 3 and bool(args[0].dim() == 3) and {args[1] % 3, args[2] % 3} == {1, 2}
    return _is_mt(func) and bool(args[0].dim() == 3)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_mt(func: Any) -> bool:
    """Whether it is the property mT; what reads a property is made anew every time, so it is equal and never the same."""
    return bool(func == Tensor.mT.__get__)  # type: ignore[attr-defined]


class FusedDots(nn.Module):
    """Mixed in front of the module whose forward has the products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, looked at."""
        with _Looking():
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class FuseDots:
    """Run pairwise products in one kernel. It has no options."""

    name: ClassVar[str] = "fused_dots"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Modules in whose forward a tensor is multiplied by its own transpose and then indexed."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"what it multiplies is not known: {flow.reason}")
            return
        makers = {value: call for call in flow.calls for value in call.outputs}
        places = {call.inside for call in flow.calls if _is_gram(flow, call, makers)}
        faults = _find_faults(editor, places) if places else {}
        for name, module in list(editor.modules()):
            if name in faults:
                editor.leave(name, f"its products may be indexed otherwise than the kernel does: {faults[name]}")
            elif name in places:
                editor.mix(name, FusedDots)
                editor.change(name, f"{type(module).__name__}: pairwise products in one kernel", "rounding")


def _find_faults(editor: Editor, places: Collection[str]) -> dict[str, str]:
    """What is wrong with the pairs that the example shows, by the module whose forward has them. Each is looked at as `FusedDots` will: from the beginning of its forward to the end."""
    if editor.example is None:
        return dict.fromkeys(places, "which pairs it asks for is not known without an example; pass example=")
    faults: dict[str, str] = {}
    with ExitStack() as hooks, undisturbed(editor.model), torch.no_grad():
        for name, module in editor.modules():
            if name in places:
                hooks.enter_context(_looked_at(module, name, faults))
        call_model(editor.model, editor.example)
    return faults


@contextmanager
def _looked_at(module: nn.Module, name: str, faults: dict[str, str]) -> Iterator[None]:
    running: list[_Looking] = []  # a module may call itself

    def enter(*_: Any) -> None:
        running.append(_Looking(use=False))
        running[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        looking = running.pop()
        looking.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for fault in looking.faults:
            faults.setdefault(name, fault)

    handles = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_gram(flow: Flow, call: Call, makers: dict[int, Call]) -> bool:
    """A product of x [B, n, d] with its transpose that is read by one index and by nothing else."""
    if call.site is not None or call.op not in ("bmm", "matmul") or len(call.inputs) != 2:
        return False
    x, turned = (_source(flow, value, makers) for value in call.inputs)
    turn = makers.get(turned)
    if turn is None or turn.op not in ("transpose", "permute") or turn.inputs[:1] != (x,):
        return False
    made = call.outputs[0]
    readers = flow.readers(made)
    while len(readers) == 1 and _is_same(flow, readers[0]):
        made = readers[0].outputs[0]
        readers = flow.readers(made)
    return len(readers) == 1 and readers[0].op == "index" and made not in flow.results


def _source(flow: Flow, value: int, makers: dict[int, Call]) -> int:
    """Behind the views that matmul puts around its operands."""
    while (maker := makers.get(value)) is not None and _is_same(flow, maker):
        value = maker.inputs[0]
    return value


def _is_same(flow: Flow, call: Call) -> bool:
    if call.site is not None or call.op not in _VIEWS or len(call.inputs) != 1 or len(call.outputs) != 1:
        return False
    return flow.shapes[call.inputs[0]] == flow.shapes[call.outputs[0]]
