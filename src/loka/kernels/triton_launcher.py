"""Launch a Triton kernel with little work of the host.

`kernel[grid](...)` binds its arguments, asks of each what the kernel could be specialised for, joins the answers into a string and looks the compiled kernel up by it: 80 to 100 us of Python for
kernels like ours, whose forty arguments are mostly constants. A GPU that waits for the host waits for that. Here the compiled kernel is found by the few facts that can differ between two calls
of a program, and given its arguments by Triton's own `CompiledKernel`:

    tensor       its type, and whether it starts at a multiple of 16 bytes
    descriptor   the type and alignment of its tensor, and the block
    number       whether it is 1, a multiple of 16, and how many bits it needs; of floats nothing
    constant     its value

Triton specialises for no more than that on NVIDIA's GPUs; a call that differs in any of it goes to Triton, which compiles or finds the kernel, and is remembered. An argument of any other kind (a tuple, a NumPy number) makes
a launch that Triton alone does. Triton's settings (`TRITON_DEBUG`, instrumentation) count where a kernel is launched first: what was compiled before they changed stays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST = 4096  # launches that a kernel remembers: a program with more shapes than that starts anew


def quick(kernel: Any) -> Any:
    """A kernel that is launched like before, `kernel[grid](*arguments, num_warps=...)`, in less time from the second launch on.

    Args:
        kernel: of `triton.jit`; one that other kernels call must not be wrapped.

    Returns:
        What launches it. Under Triton's interpreter, and on AMD's GPUs, where Triton asks for the size of tensors too, the kernel itself.

    Example:
        >>> @quick
        ... @triton.jit
        ... def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr): ...
        >>> copy[(1,)](x, y, 64, 64, num_warps=4)
    """
    return Quick(kernel) if isinstance(kernel, JITFunction) and torch.version.hip is None else kernel


class Quick:
    """A kernel and what was compiled of it.

    Args:
        kernel: of `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.jitted = kernel
        constant = [bool(parameter.is_constexpr) for parameter in kernel.params]
        self._arguments = len(constant)
        self._first = constant.index(True) if True in constant else len(constant)  # of the constants, which come last
        if not all(constant[self._first :]):
            raise ValueError(f"{kernel}: expected the constants behind all other arguments")
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """As of a kernel."""

        def launch(*args: Any, **options: Any) -> None:
            key = self.key(args, options)
            found = None if key is None else self._compiled.get(key)
            if found is not None:
                found[grid if len(grid) == 3 else (*grid, 1, 1)[:3]](*args)
                return
            for arg in args:
                if type(arg) is TensorDescriptor:
                    arg.__post_init__()  # the checks that `describe` leaves out
            found = self.jitted[grid](*args, **options)
            if key is not None and len(args) == self._arguments:
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                self._compiled[key] = found

        return launch

    def key(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
        """What decides which compiled kernel runs.

        Args:
            args: of the launch, constants included.
            options: of the launch.

        Returns:
            Equal only for two launches of one compiled kernel; None where an argument is of a kind that is not known here.
        """
        key: list[Any] = [torch.cuda.current_device(), args[self._first :], *options.items()]
        add = key.append
        for arg in args[: self._first]:
            kind = type(arg)
            if kind is int:
                add(_kinds.get(arg) or _kind_of(arg))
            elif arg is None:
                add(None)
            elif kind is TensorDescriptor:
                base = arg.base
                add(base.dtype)
                add((*arg.block_shape, arg.strides[-1], arg.strides[0] * base.element_size() & 15, base.data_ptr() & 15, 0 in arg.shape))  # fmt: skip
            elif isinstance(arg, Tensor):
                add(arg.dtype)
                add(arg.data_ptr() & 15 == 0)
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None
        return tuple(key)


_kinds: dict[int, int] = {}


def _kind_of(number: int) -> int:
    """What Triton asks of a number: whether it is 1, a multiple of 16, and how many bits it needs. Never 0."""
    bits = (number if number >= 0 else ~number).bit_length()  # -2**31 still is an int32
    found = (
        1
        + 2 * (number == 1)
        + 4 * (number & 15 == 0)
        + 8 * (bits > 31)
        + 16 * (bits > 63)
        + 32 * (number < 0)
        + 64 * (bits > 64)
    )
    if len(_kinds) < _MOST:
        _kinds[number] = found
    return found


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A matrix for TMA, without the checks that `TensorDescriptor.from_tensor` makes every time; a quick kernel makes them at the first launch of its kind.

    Args:
        x: two dimensions, rows of which start at multiples of 16 bytes.
        block: rows and columns that a program reads at once.

    Returns:
        The argument of a kernel.
    """
    made = _new(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, x.shape, x.stride(), block
    return made


_new = TensorDescriptor.__new__
