"""fused_dots: run pairwise dot products of feature vectors in one kernel.

    torch.bmm(x, x.transpose(1, 2))[:, i, j]        ->        loka.kernels.dots(x, i, j)

The left side computes n x n products for every example (27 x 27, too misaligned for a fast GEMM) and then gathers half
of them. The pattern is recognized from a run on the example, in any module: a batched product of a tensor with its own
transpose that is read only by an index.

The user's forward still runs. A torch function mode intercepts three operations inside it: a transpose of the last two
dimensions, a batched product of a tensor with its transpose, and an index of that product by two index tensors, which
returns the kernel's result. In compiled code the unused product is never computed. There, a transpose written as `x.mT`
is not seen and the product stays with torch. Sums are in another order: rounding.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.kernels.dots.call import DTYPES
from loka.kernels.dots.pairs import find_fault
from loka.mods.calling import find_saving_hooks, is_checkpointed
from loka.mods.editor import Editor
from loka.mods.sharing import is_named_transpose
from loka.nn.mix import multiply_pairs
from loka.nn.sharing import Recorded, each, is_valid, take_stamp
from loka.nn.writing import writes
from loka.records.mods import ModClass
from loka.units.example import call_model
from loka.units.flow import Call, Flow
from loka.units.undisturbed import undisturbed

_VIEWS = ("expand", "view", "_unsafe_view", "reshape", "_reshape_alias")
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_PRODUCTS = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Joined(NamedTuple):
    """A concatenation of two batches of vectors, with whether gradients were enabled and a stamp of the graph."""

    result: Tensor
    first: Tensor
    second: Tensor
    grad: bool
    stamp: str


class _ReplaceDots(TorchFunctionMode):
    """Computes indexed pairwise products with the kernel.

    An in-place write clears all recorded tensors, because they may no longer hold what was computed.
    """

    def __init__(self, *, replace: bool = True) -> None:
        super().__init__()
        self.replace = replace  # False: only check whether the kernel supports them
        self.faults: list[str] = []  # why the kernel does not support some pairs
        # with whether gradients were enabled: what is made without them passes none to x
        self.transposes: Recorded[tuple[Tensor, Tensor, bool]] = ()  # (transpose, its source, enabled)
        self.products: Recorded[tuple[Tensor, Tensor, bool]] = ()  # (x x^T, x, enabled)
        self.concatenations: Recorded[_Joined] = ()
        self.saving = find_saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and self.products and not is_checkpointed(self.saving):
            found = self._replace_index(args[0], args[1])
            if found is not None:
                return found
        out = func(*args, **kwargs)
        if writes(func, args, kwargs):
            # clear only what is not empty: a compiled autograd function must not mutate outside state
            if self.transposes:
                self.transposes = ()
            if self.products:
                self.products = ()
            if self.concatenations:
                self.concatenations = ()
        elif is_transpose(func, args):
            self.transposes = ((out, args[0], torch.is_grad_enabled()), self.transposes)
        elif func in _CONCATENATIONS and _joins_two(out, args, kwargs):
            first, second = args[0]
            joined = _Joined(out, first, second, torch.is_grad_enabled(), take_stamp())
            self.concatenations = (joined, self.concatenations)
        elif func in _PRODUCTS and len(args) == 2:
            for transpose, x, grad in each(self.transposes):
                if args[1] is transpose and args[0] is x and grad == torch.is_grad_enabled():
                    self.products = ((out, x, grad), self.products)
        return out

    def _replace_index(self, value: Any, index: Any) -> Tensor | None:
        if not isinstance(index, tuple) or len(index) != 3 or not isinstance(index[0], slice):
            return None
        first, second = index[1], index[2]
        if index[0] != slice(None) or not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        for product, x, grad in each(self.products):
            if value is product and grad == torch.is_grad_enabled():
                if not self._check_pairs(x, first, second) or not self.replace:
                    return None
                joined = self._find_parts(x)
                if joined is not None:
                    return multiply_pairs(joined.second, first, second, joined.first)
                return multiply_pairs(x, first, second)
        return None

    def _find_parts(self, x: Tensor) -> _Joined | None:
        """Return the two tensors that x was concatenated from, if the kernel should take these instead of x.

        If nothing else reads the concatenation, compiled code never writes it. In training the parts are cast and then
        concatenated instead of the other way round: the gradient of a part is then cast last, which writes it
        contiguously. Otherwise it is a slice, which whoever reads it has to copy: 160 us of the 1.2 ms of a plain DLRM's
        step (16,384 rows, one H200). Eager training would only concatenate twice.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return None
        for joined in each(self.concatenations):
            if joined.result is x and joined.grad == torch.is_grad_enabled() and is_valid(joined.stamp):
                return joined
        return None

    def _check_pairs(self, x: Tensor, first: Tensor, second: Tensor) -> bool:
        """Return True if the kernel computes what the index would select, and record the fault if not.

        Compiled code cannot see the indices' values; they were checked on the example before.
        """
        if torch.compiler.is_compiling():
            return _is_supported(x, first, second)
        fault = find_fault(first, second, x.shape[1])
        if fault is None and not _is_supported(x, first, second):
            fault = f"vectors of {x.dtype} on {x.device}, indices on {first.device} and {second.device}"
        if fault is not None:
            self.faults.append(fault)
        return fault is None


def _is_supported(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return True if the kernel supports these dtypes, devices and shapes. The indices' values are not read."""
    if x.dtype not in DTYPES or first.device != x.device or second.device != x.device:
        return False
    if any(index.dim() != 1 or index.dtype != torch.int64 for index in (first, second)):
        return False
    return first.shape == second.shape and first.shape[0] <= x.shape[1] ** 2


def _joins_two(out: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a concatenation of two batches of vectors along dimension 1."""
    dim = args[1] if len(args) == 2 else kwargs.get("dim", 0)
    if not args or not isinstance(args[0], (tuple, list)) or len(args[0]) != 2 or out.dim() != 3 or dim not in (1, -2):
        return False
    return all(part.dtype in DTYPES and part.dim() == 3 for part in args[0])


def is_transpose(func: Any, args: Any) -> bool:
    """Return True if a function transposes the last two dimensions of a 3-D tensor."""
    return is_named_transpose(func, args, {}) or (_is_mt(func) and bool(args[0].dim() == 3))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_mt(func: Any) -> bool:
    """Return True for the getter of Tensor.mT, a new object on every access, so it is compared with == and not `is`."""
    return bool(func == Tensor.mT.__get__)  # type: ignore[attr-defined]


class FusedDots(nn.Module):
    """Mixin for a module whose forward computes pairwise products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward under the mode."""
        with _ReplaceDots():
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class FuseDots:
    """Run pairwise products in one kernel. No options."""

    name: ClassVar[str] = "fused_dots"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite modules whose forward multiplies a tensor by its own transpose and indexes the product."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"which products its forwards compute is not known: {flow.reason}")
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
    """Return, by module, why the kernel does not support the pairs that its forward uses on the example.

    Each module is observed for the whole of its forward, as `FusedDots` will run it.
    """
    if editor.example is None:
        return dict.fromkeys(places, "which pairs it selects is not known without an example; hint: pass example=")
    faults: dict[str, str] = {}
    with ExitStack() as hooks, undisturbed(editor.model), torch.no_grad():
        for name, module in editor.modules():
            if name in places:
                hooks.enter_context(_observe(module, name, faults))
        call_model(editor.model, editor.example)
    return faults


@contextmanager
def _observe(module: nn.Module, name: str, faults: dict[str, str]) -> Iterator[None]:
    running: list[_ReplaceDots] = []  # a stack, because a module may call itself

    def enter(*_: Any) -> None:
        running.append(_ReplaceDots(replace=False))
        running[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        mode = running.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for fault in mode.faults:
            faults.setdefault(name, fault)

    handles = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_gram(flow: Flow, call: Call, makers: dict[int, Call]) -> bool:
    """Return True for a product of x [B, n, d] with its transpose that is read by one index and nothing else."""
    if call.site is not None or call.op not in ("bmm", "matmul") or len(call.inputs) != 2:
        return False
    x, other = (_skip_views(flow, value, makers) for value in call.inputs)
    transpose = makers.get(other)
    if transpose is None or transpose.op not in ("transpose", "permute") or transpose.inputs[:1] != (x,):
        return False
    made = call.outputs[0]
    readers = flow.readers(made)
    while len(readers) == 1 and _keeps_shape(flow, readers[0]):
        made = readers[0].outputs[0]
        readers = flow.readers(made)
    return len(readers) == 1 and readers[0].op == "index" and made not in flow.results


def _skip_views(flow: Flow, value: int, makers: dict[int, Call]) -> int:
    """Return the value behind the views that matmul makes of its operands."""
    while (maker := makers.get(value)) is not None and _keeps_shape(flow, maker):
        value = maker.inputs[0]
    return value


def _keeps_shape(flow: Flow, call: Call) -> bool:
    if call.site is not None or call.op not in _VIEWS or len(call.inputs) != 1 or len(call.outputs) != 1:
        return False
    return flow.shapes[call.inputs[0]] == flow.shapes[call.outputs[0]]
