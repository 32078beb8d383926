"""Kernels as torch ops: a compiler sees one call and not the Python behind it, and calling one costs little.

`torch.library.custom_op` registers the same with more in front of it (its own autograd, checks of aliases, versions of mutated tensors): 30 to 45 us a call on a CPU, where this
takes 8. A step of a Wukong makes hundreds of them, and without a CUDA graph a GPU waits for that.

An op that is not given to `differentiate` has no gradient: the autograd functions that call these write theirs down. Whoever differentiates through one all the same gets an error:
torch alone would warn once and hand back no gradient.

The dispatcher's way in and out costs half of what an op of ours costs the host: twenty arguments, and empty tensors in place of absent results. It is taken where somebody is on that way: a
compiler, a tracer, a mode, a transform, a profiler, a subclass of tensors, autograd. Else `invoke` calls the function; and so does what a compiler has written down, the op itself (`_shorten`).
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("loka", "FRAGMENT")  # type: ignore[no-untyped-call]

Function = Callable[..., Any]
_functions: dict[Any, Function] = {}  # of ops
P = ParamSpec("P")
R = TypeVar("R")


def torch_op(name: str, *, mutates: Sequence[str] = (), tags: Sequence[torch.Tag] = ()) -> Callable[[Function], Any]:
    """A function as the torch op `loka::NAME`. A result that is None is an empty tensor of float32 in what the op returns: its signature is fixed.

    Args:
        name: without the namespace.
        mutates: arguments that are written to.
        tags: of torch, beside the one that says that compilers may see it.

    Returns:
        A decorator; what it makes is called like the function, or by `invoke`, and given to `fake_of`.

    Example:
        >>> @torch_op("twice")
        ... def twice(x: Tensor) -> Tensor:
        ...     return 2 * x
        >>> fake_of(twice)(torch.empty_like)
    """

    def register(function: Function) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
        placed = on_device(function)
        _LIBRARY.impl(name, _bar(name, _whole(placed)), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        op = getattr(torch.ops.loka, name).default
        _shorten(op, placed)  # before anybody has asked for its hash, which is that of what it calls
        _functions[op] = placed

        def below(*args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        # asked by tracers alone, which do not run the function
        op.py_impl(torch._C.DispatchKey.Autograd)(_bar(name, below))
        return op

    return register


def on_device(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run with the GPU of its tensors as the current one, as torch's own ops are: Triton launches on the current one, which is another for a model on cuda:1 in a process that chose none.

    Args:
        function: of tensors, at least one of them positional.

    Returns:
        What is called in its place.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_cuda:
                index = arg.get_device()
                if index == torch.cuda.current_device():
                    break
                with torch.cuda.device(index):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def invoke(op: Any, *args: Any) -> Any:
    """Call an op in the cheapest way that nobody can tell from `op(*args)`, but for results that are absent: those may be None instead of empty.

    Args:
        op: of `torch_op`, and not given to `differentiate`.
        args: all of its arguments, none of them a list of tensors.

    Returns:
        What the function returns, or the op.

    Example:
        >>> with torch.no_grad():
        ...     y = invoke(twice, x)
    """
    if torch.compiler.is_compiling() or _is_followed(args):
        return op(*args)
    return _functions[op](*args)


def _shorten(op: Any, function: Function) -> None:
    """Let compiled code, which calls the op, go by the dispatcher only where it must."""
    dispatched = op._op
    empty: dict[tuple[torch.device, int], Tensor] = {}  # for results that are absent: nobody reads or writes them

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not call.direct or torch.compiler.is_compiling() or _is_followed(args):  # type: ignore[attr-defined]
            return dispatched(*args, **kwargs)
        found = function(*args)
        if type(found) is not tuple:
            return found
        device = args[0].device
        return tuple([fill(device, place) if result is None else result for place, result in enumerate(found)])

    def fill(device: torch.device, place: int) -> Tensor:
        """One tensor for a place, kept: compiled code checks that no two results of an op are the same tensor."""
        nothing = empty.get((device, place))
        if nothing is None:
            with torch.inference_mode(False):  # it outlives the block it is made in
                nothing = empty[device, place] = torch.empty(0, dtype=torch.float32, device=device)
        return nothing

    call.direct = True  # type: ignore[attr-defined]  # until it is given a gradient, for which the dispatcher is needed
    op._op = call


_dispatch_modes: Function = torch._C._len_torch_dispatch_stack
_function_modes: Function = torch._C._len_torch_function_stack
_transform: Function = torch._C._functorch.peek_interpreter_stack
_traced: Function = torch._C._get_tracing_state
_profiled: Function = torch._C._autograd._profiler_enabled
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, type(None), bool, int, float, str, list})


def _is_followed(args: tuple[Any, ...]) -> bool:
    """Whether torch does more in a call than to call."""
    if torch.is_grad_enabled() or _dispatch_modes() or _function_modes() or _transform() is not None:
        return True
    if _traced() is not None or _profiled() or forward_ad._current_level >= 0:
        return True
    return not _PLAIN.issuperset(map(type, args)) or bool(getattr(args[0], "is_meta", False))


def _whole(function: Function) -> Function:
    """The function, with empty tensors in place of results that are None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if type(found) is not tuple or not any(result is None for result in found):
            return found
        like = next(result for result in found if result is not None)
        return tuple(like.new_empty(0, dtype=torch.float32) if result is None else result for result in found)

    return run


class _NoGradient(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"loka::{ctx.name} has no gradient; hint: call it under torch.no_grad(), or use a module or function that has one"
        )


def _bar(name: str, function: Function) -> Function:
    """The function, whose results raise where somebody differentiates them, and which raises in forward mode. Autograd functions call ops with gradients off and pay for one question."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and _has_tangent((*args, *kwargs.values())):
            raise NotImplementedError(f"loka::{name} has no forward-mode derivative; hint: reverse mode, or backend=\"reference\"")  # fmt: skip
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        needed = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
        with torch.set_grad_enabled(not needed):
            found = function(*args, **kwargs)

        def mark(output: Any) -> Any:
            barred = bool(needed) and isinstance(output, Tensor) and output.is_floating_point()
            return _NoGradient.apply(name, output, *needed) if barred else output  # type: ignore[no-untyped-call]

        return type(found)(map(mark, found)) if type(found) in (tuple, list) else mark(found)

    return run


def _has_tangent(args: tuple[Any, ...]) -> bool:
    """Whether forward-mode differentiation would be lost here. torch.func takes tangents off before it calls, so that inside of its jvp every call counts."""
    transforms = sys.modules.get("torch._functorch.eager_transforms")
    if getattr(transforms, "JVP_NESTING", 0):
        return True
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)  # type: ignore[no-untyped-call]


def fake_of(op: Any) -> Callable[[Function], Function]:
    """Register what an op returns for tensors without data: shapes, types and strides.

    Args:
        op: of `torch_op`.

    Returns:
        A decorator for the function that says it.
    """
    register: Callable[[Function], Function] = torch.library.register_fake(op, lib=_LIBRARY)
    return register


def differentiate(op: Any, backward: Function, *, save: Function) -> None:
    """Give an op its gradient.

    Args:
        op: of `torch_op`.
        backward: (ctx, *gradients) -> gradients of the arguments.
        save: (ctx, inputs, output) -> None, what backward needs.
    """
    op.py_kernels.pop(torch._C.DispatchKey.Autograd)
    del _functions[op]
    op._op.direct = False
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)
