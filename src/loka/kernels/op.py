"""Register kernels as torch ops with low call overhead. A compiler sees one opaque call instead of Python code.

`torch.library.custom_op` does the same with more layers in front (its own autograd, alias checks, versions of mutated
tensors): 30 to 45 us a call on a CPU, compared with 8 here. One step of a Wukong calls hundreds of ops, and
without a CUDA graph the GPU waits for the host.

An op has no gradient unless it is passed to `differentiate`; the autograd functions that call these ops define their
own. Differentiating through such an op raises, where torch alone would warn once and return no gradient.

Half of an op's host time is the dispatcher: converting twenty arguments, and making empty tensors for absent results.
So the dispatcher is used only if something needs to see the call: a compiler, a tracer, a mode, a transform, a
profiler, a tensor subclass or autograd. Otherwise `invoke` calls the Python function directly, and so does the op
itself when compiled code calls it (`_bypass_dispatcher`).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("loka", "FRAGMENT")  # type: ignore[no-untyped-call]

Function = Callable[..., Any]
_functions: dict[Any, Function] = {}  # op -> the Python function that implements it
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
P = ParamSpec("P")
R = TypeVar("R")


def torch_op(name: str, *, mutates: Sequence[str] = (), tags: Sequence[torch.Tag] = ()) -> Callable[[Function], Any]:
    """Register a function as the torch op `loka::NAME`.

    An op's signature is fixed, so the op returns an empty float32 tensor for a result that is None. No argument may have
    a default: compiled code passes those by name, which only the dispatcher understands.

    Args:
        name: the op's name, without the namespace.
        mutates: names of the arguments that are written in place.
        tags: torch tags to add to `pt2_compliant_tag`.

    Returns:
        A decorator that returns the op. Call it like the function or through `invoke`, and pass it to `fake_of`.

    Example:
        >>> @torch_op("twice")
        ... def twice(x: Tensor) -> Tensor:
        ...     return 2 * x
        >>> fake_of(twice)(torch.empty_like)
    """

    def register(function: Function) -> Any:
        named = [p.name for p in inspect.signature(function).parameters.values() if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]  # fmt: skip
        if named:
            raise ValueError(f"loka::{name}: {', '.join(named)} would be passed by name; hint: no defaults and no keyword-only arguments")  # fmt: skip
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
        implementation = on_device(function)
        kernel = _forbid_gradient(name, _fill_absent_results(implementation))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        op = getattr(torch.ops.loka, name).default
        _bypass_dispatcher(op, function)  # before the op is hashed: its hash is that of `op._op`
        _functions[op] = implementation

        def below_autograd(*args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        # only tracers use this kernel; they do not run the function
        op.py_impl(torch._C.DispatchKey.Autograd)(_forbid_gradient(name, below_autograd))
        return op

    return register


def on_device(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that the GPU of its tensors is the current device while it runs, as torch's own ops do.

    Triton launches on the current device, which is cuda:0 by default even if the model is on cuda:1.

    Args:
        function: takes at least one tensor as a positional argument.

    Returns:
        The wrapped function.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_cuda:
                index = arg.get_device()
                if index == _current_device():
                    break
                with torch.cuda.device(index):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def invoke(op: Any, *args: Any) -> Any:
    """Call an op, skipping the dispatcher if nothing needs it.

    Equivalent to `op(*args)`, except that an absent result may be None instead of an empty tensor.

    Args:
        op: an op made by `torch_op` that was not passed to `differentiate`.
        args: all of its arguments; none may be a list of tensors.

    Returns:
        The result of the op or of its function.

    Example:
        >>> with torch.no_grad():
        ...     y = invoke(twice, x)
    """
    if torch.compiler.is_compiling() or _needs_dispatcher(args):
        return op(*args)
    return _functions[op](*args)


def _bypass_dispatcher(op: Any, function: Function) -> None:
    """Make calls of the op, which is what compiled code contains, skip the dispatcher if nothing needs it."""
    dispatched, elsewhere = op._op, on_device(function)
    empty: dict[torch.device, list[Tensor]] = {}  # stand-ins for absent results, never read or written

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not call.direct or torch.compiler._is_compiling_flag or _needs_dispatcher(args):  # type: ignore[attr-defined]
            return dispatched(*args, **kwargs)
        first = args[0]
        here = isinstance(first, Tensor) and first.is_cuda and first.get_device() == _current_device()
        found = function(*args) if here else elsewhere(*args)
        if type(found) is tuple:
            for result in found:
                if result is None:
                    spare = empty.get(first.device) or make_empty(first.device, len(found))
                    return tuple([other if result is None else result for result, other in zip(found, spare, strict=True)])  # fmt: skip
        return found

    def make_empty(device: torch.device, count: int) -> list[Tensor]:
        """Cache a stand-in for each result. Compiled code checks that no two results are one tensor."""
        with torch.inference_mode(False):  # cached beyond this call, so they must not be inference tensors
            made = empty[device] = [torch.empty(0, dtype=torch.float32, device=device) for _ in range(count)]
        return made

    call.direct = True  # type: ignore[attr-defined]  # `differentiate` clears it: gradients need the dispatcher
    op._op = call


_dispatch_modes: Function = torch._C._len_torch_dispatch_stack
_function_modes: Function = torch._C._len_torch_function_stack
_current_transform: Function = torch._C._functorch.peek_interpreter_stack
_tracing_state: Function = torch._C._get_tracing_state
_profiler_enabled: Function = torch._C._autograd._profiler_enabled
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.dtype, type(None), bool, int, float, str, list})


def _needs_dispatcher(args: tuple[Any, ...]) -> bool:
    """Return True if autograd, a mode, a transform, a tracer, a profiler or a tensor subclass must see the call."""
    if torch.is_grad_enabled() or _dispatch_modes() or _function_modes() or _current_transform() is not None:
        return True
    if _tracing_state() is not None or _profiler_enabled() or forward_ad._current_level >= 0:
        return True
    if not _PLAIN_TYPES.issuperset(map(type, args)):
        return True
    # a kernel reads memory, where the sign of a lazily negated tensor (`z.conj().imag`) is not; the dispatcher applies it
    first = args[0]
    return isinstance(first, Tensor) and (first.is_meta or first.is_neg())


def _fill_absent_results(function: Function) -> Function:
    """Wrap a function so that it returns empty tensors in place of None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if type(found) is not tuple or not any(result is None for result in found):
            return found
        like = next(result for result in found if result is not None)
        return tuple(like.new_empty(0, dtype=torch.float32) if result is None else result for result in found)

    return run


class _NoGradient(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"loka::{ctx.name} has no gradient; hint: call it under torch.no_grad(), or use a module or function that has one"
        )


def _forbid_gradient(name: str, function: Function) -> Function:
    """Wrap a function so that backward through its results raises, and forward-mode AD raises at once.

    Autograd functions call ops with gradients disabled and pay only for that check.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and _has_tangent((*args, *kwargs.values())):
            raise NotImplementedError(f"loka::{name} has no forward-mode derivative; hint: reverse mode, or backend=\"reference\"")  # fmt: skip
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        needed = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
        with torch.set_grad_enabled(not needed):
            found = function(*args, **kwargs)

        def mark(output: Any) -> Any:
            differentiable = bool(needed) and isinstance(output, Tensor) and output.is_floating_point()
            return _NoGradient.apply(name, output, *needed) if differentiable else output  # type: ignore[no-untyped-call]

        return type(found)(map(mark, found)) if type(found) in (tuple, list) else mark(found)

    return run


def _has_tangent(args: tuple[Any, ...]) -> bool:
    """Return True if the call would lose a forward-mode tangent.

    torch.func strips tangents before it calls the op, so every call inside its jvp counts.
    """
    transforms = sys.modules.get("torch._functorch.eager_transforms")
    if getattr(transforms, "JVP_NESTING", 0):
        return True
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)  # type: ignore[no-untyped-call]


def fake_of(op: Any) -> Callable[[Function], Function]:
    """Register the fake (meta) implementation of an op: the shapes, dtypes and strides of its results.

    Args:
        op: an op made by `torch_op`.

    Returns:
        A decorator for the fake implementation.
    """
    register: Callable[[Function], Function] = torch.library.register_fake(op, lib=_LIBRARY)
    return register


def differentiate(op: Any, backward: Function, *, save: Function) -> None:
    """Register the gradient of an op.

    Args:
        op: an op made by `torch_op`.
        backward: (ctx, *gradients) -> gradients of the arguments.
        save: (ctx, inputs, output) -> None, saves what backward needs.
    """
    op.py_kernels.pop(torch._C.DispatchKey.Autograd)
    del _functions[op]
    op._op.direct = False
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)
