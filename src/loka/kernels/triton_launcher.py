"""Launch Triton kernels with little host time.

`kernel[grid](...)` binds the arguments, computes the specialization of each, joins these into a string, looks the
compiled kernel up by it, and encodes every TMA descriptor. For kernels like ours, whose forty arguments are mostly
constants, that takes 100 us of Python and more, while the GPU may be waiting for the host. Here the compiled kernel is
found by the few facts that can differ between two calls of a program:

    tensor       its dtype (or the one it is reinterpreted as), and whether it starts at a multiple of 16 bytes
    descriptor   the dtype of its tensor, and the block
    integer      whether it is 1, a multiple of 16, and how many bits it needs
    float        nothing
    constant     its value

On NVIDIA GPUs Triton specializes for nothing else. A call that differs in any of these goes through Triton, which
compiles or finds the kernel, and is cached. A launch with any other kind of argument (a tuple, a NumPy number) always
goes through Triton. Triton's settings (`TRITON_DEBUG`, instrumentation) take effect at the first launch of a kernel:
changing them later does not affect kernels that are already compiled.

A kernel whose shape is known before its tensors are is launched with less (`triton_bound`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction, MockTensor, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.compiling import await_kernel
from loka.kernels.triton_compiled import CACHE_LIMIT, Compiled, check_descriptors

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# padding, and fields that later versions add
_other_fields = attrgetter(*(field.name for field in fields(TensorDescriptor)[4:]))


def quick(kernel: Any) -> Any:
    """Wrap a Triton kernel so that its launches take less host time from the second one on.

    The kernel is still launched as `kernel[grid](*arguments, num_warps=...)`.

    Args:
        kernel: made by `triton.jit`. A function that other kernels call must not be wrapped.

    Returns:
        The wrapped kernel. The kernel itself under Triton's interpreter, and on AMD GPUs, where Triton also specializes
        for the size of tensors.

    Example:
        >>> @quick
        ... @triton.jit
        ... def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr): ...
        >>> copy[(1,)](x, y, 64, 64, num_warps=4)
    """
    return Quick(kernel) if isinstance(kernel, JITFunction) and torch.version.hip is None else kernel


class Quick:
    """A Triton kernel and its compiled variants.

    Args:
        kernel: made by `triton.jit`, with all constexpr parameters last.
    """

    def __init__(self, kernel: Any) -> None:
        self.jitted = kernel
        constant = [bool(parameter.is_constexpr) for parameter in kernel.params]
        self._arguments = len(constant)
        self._first = constant.index(True) if True in constant else len(constant)  # index of the first constant
        if not all(constant[self._first :]):
            raise ValueError(f"{kernel}: expected the constexpr parameters after all others")
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel on this grid."""

        def launch(*args: Any, **options: Any) -> None:
            self.launch(grid, args, options)

        return launch

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Compiled | None:
        """Launch the kernel on a grid, and return what it was compiled to; None if that is not known."""
        plain = list(args)
        key, described = self.read(plain, options)
        found = None if key is None else self._compiled.get(key)
        if found is None:
            check_descriptors(args)
            if key is not None:
                await_kernel(
                    (id(self), key), partial(self._compile, key[0], tuple(_stand_in(arg) for arg in args), options)
                )
            made = self.jitted[grid](*args, **options)
            if made is not None and key is not None and len(args) == self._arguments:
                if len(self._compiled) >= CACHE_LIMIT:
                    self._compiled.clear()
                self._compiled[key] = found = Compiled(made)
            return found
        grid = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if found.is_left_to_triton():
            found.launch_through_triton(grid, args)
            return found
        for fact in reversed(described):  # a descriptor expands to several arguments; last first keeps positions valid
            plain[fact[0] : fact[0] + 1] = found.map_of(fact, args[fact[0]])
        found.launch(grid, _current_device(), plain)
        return found

    def _compile(self, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile the kernel for a launch on a GPU with these arguments. Triton finds it when it is launched."""
        triton.runtime.driver.active.set_current_device(device)  # a new thread begins with the first GPU
        self.jitted.warmup(*args, grid=(1,), **options)

    def read(self, args: list[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...] | None, list[tuple[Any, ...]]]:
        """Return the cache key of a launch, and the keys of its tensor maps.

        Args:
            args: the arguments of the launch, constants included. GPU tensors are replaced by their addresses in place,
                as Triton's launcher takes them.
            options: the keyword options of the launch.

        Returns:
            A key that is equal only for launches of the same compiled kernel, None if an argument is of an unknown
            kind. For every descriptor: its position among the arguments, address, sizes, strides and other fields.
        """
        first = self._first
        key: list[Any] = [_current_device(), *args[first:], *options.items()]
        add = key.append
        described = []
        for i, arg in enumerate(args[:first]):
            kind = type(arg)
            if kind is int:
                add(_integer_kinds.get(arg) or _integer_kind(arg))
            elif arg is None:
                add(None)
            elif isinstance(arg, Tensor):
                address = arg.data_ptr()
                add(arg.dtype)
                add(address & 15 == 0)
                if arg.is_cuda:  # Triton checks the others: it accepts pinned host memory and rejects pageable memory
                    args[i] = address
            elif kind is TensorDescriptor:
                base = arg.base
                add(base.dtype)
                add(tuple(arg.block_shape))
                described.append((i, base.data_ptr(), *arg.shape, *arg.strides, _other_fields(arg)))
            elif kind is TensorWrapper:
                add(arg.dtype)
                add(arg.data_ptr() & 15 == 0)
                if arg.base.is_cuda:
                    args[i] = arg.data_ptr()
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None, []
        return tuple(key), described


def _stand_in(arg: Any) -> Any:
    """Return an argument that Triton compiles the same kernel for, without the memory of a tensor where possible."""
    if isinstance(arg, Tensor | TensorWrapper):
        return arg if arg.data_ptr() & 15 else MockTensor(arg.dtype)
    if type(arg) is TensorDescriptor:
        made = copy(arg)
        made.base = MockTensor(arg.base.dtype)
        return made
    return arg


_integer_kinds: dict[int, int] = {}


def _integer_kind(number: int) -> int:
    """Return Triton's specialization of an integer as a nonzero code: is it 1, a multiple of 16, how many bits."""
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
    if len(_integer_kinds) >= CACHE_LIMIT:  # seeds and the row counts of ragged batches are unbounded
        _integer_kinds.clear()
    _integer_kinds[number] = found
    return found
