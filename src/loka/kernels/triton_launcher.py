"""Launch a Triton kernel with little work of the host.

`kernel[grid](...)` binds its arguments, asks of each what the kernel could be specialised for, joins the answers into a string, looks the compiled kernel up by it, and encodes every TMA
descriptor: 100 us of Python and more for kernels like ours, whose forty arguments are mostly constants. A GPU that waits for the host waits for that. Here the compiled kernel is found by the few facts
that can differ between two calls of a program:

    tensor       its type, and whether it starts at a multiple of 16 bytes
    descriptor   the type of its tensor, and the block
    number       whether it is 1, a multiple of 16, and how many bits it needs; of floats nothing
    constant     its value

Triton specialises for no more than that on NVIDIA's GPUs; a call that differs in any of it goes to Triton, which compiles or finds the kernel, and is remembered. An argument of any other kind (a tuple,
a NumPy number) makes a launch that Triton alone does. Triton's settings (`TRITON_DEBUG`, instrumentation) count where a kernel is launched first: what was compiled before they changed stays.

A compiled kernel keeps the tensor maps that Triton made of descriptors, and gets them again where all that they are made of is the same: the kernel and the place of the argument (which decide
type, block, swizzle, GPU), address, sizes, strides, and what else a descriptor says. A map holds no memory, only where it lies: weights stay, and torch's allocator hands out the same addresses step
after step. The launch itself is Triton's, with addresses in place of tensors. Where hooks are installed (a profiler's), or Triton is built in another way than the releases this was written
for (3.6 and 3.7), all of it is left to Triton.
"""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST = 4096  # launches that a kernel remembers, maps that a compiled one does: a program with more shapes than that starts anew
_runtime, _driver = triton.knobs.runtime, triton.runtime.driver
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_manner = attrgetter(*(field.name for field in fields(TensorDescriptor)[4:]))  # padding, and what later versions add


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
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """As of a kernel."""

        def launch(*args: Any, **options: Any) -> None:
            plain = list(args)
            key, described = self.read(plain, options)
            found = None if key is None else self._compiled.get(key)
            if found is not None:
                found.launch(grid, args, plain, described)
                return
            _check(args)
            made = self.jitted[grid](*args, **options)
            if made is not None and key is not None and len(args) == self._arguments:
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                self._compiled[key] = Compiled(made)

        return launch

    def read(self, args: list[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...] | None, list[tuple[Any, ...]]]:
        """What decides which compiled kernel runs, and what decides its tensor maps.

        Args:
            args: of the launch, constants included; tensors on a GPU are replaced by their addresses, as Triton's launcher would ask for them.
            options: of the launch.

        Returns:
            A key that is equal only for two launches of one compiled kernel, None where an argument is of a kind that is not known here. And for every descriptor its place among the
            arguments, address, sizes, strides and manner.
        """
        first = self._first
        key: list[Any] = [_current_device(), *args[first:], *options.items()]
        add = key.append
        described = []
        for i, arg in enumerate(args[:first]):
            kind = type(arg)
            if kind is int:
                add(_kinds.get(arg) or _kind_of(arg))
            elif arg is None:
                add(None)
            elif isinstance(arg, Tensor):
                address = arg.data_ptr()
                add(arg.dtype)
                add(address & 15 == 0)
                if arg.is_cuda:  # others Triton examines: pinned memory it takes, and the host's it refuses
                    args[i] = address
            elif kind is TensorDescriptor:
                base = arg.base
                add(base.dtype)
                add(tuple(arg.block_shape))
                described.append((i, base.data_ptr(), *arg.shape, *arg.strides, _manner(arg)))
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None, []
        return tuple(key), described


class Compiled:
    """A compiled kernel, and the tensor maps that it was launched with.

    Args:
        kernel: `CompiledKernel` of Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launcher, self._facts = _taken_apart(kernel)
        self._maps: dict[tuple[Any, ...], list[Any]] = {}

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], plain: list[Any], described: list[tuple[Any, ...]]) -> None:  # fmt: skip
        """Run it.

        Args:
            grid: one to three numbers.
            args: as Triton takes them.
            plain, described: of `Quick.read`.
        """
        grid = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if self._launcher is None or _watched():
            _check(args)
            self.kernel[grid](*args)
            return
        for one in reversed(described):  # what a descriptor becomes is longer: from the last one on, places stay right
            at = one[0]
            plain[at : at + 1] = self._maps.get(one) or self._encode(one, args[at])
        active, kernel = _driver.active, self.kernel
        stream = active.get_current_stream(_current_device())
        self._launcher(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *plain)

    def _encode(self, described: tuple[Any, ...], descriptor: TensorDescriptor) -> list[Any]:
        """Triton's arguments of a descriptor: a tensor map, sizes and strides. Where there is no TMA it is the tensor itself, which must not be kept."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        _check((descriptor,))
        facts = self._facts[described[0]]
        made: list[Any] = make_tensordesc_arg(descriptor, facts)
        if facts is not None:
            if len(self._maps) >= _MOST:
                self._maps.clear()
            self._maps[described] = made
        return made


_LAUNCHER = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
_HOOKS = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]


def _taken_apart(kernel: Any) -> tuple[Any, dict[int, Any]]:
    """Triton's launcher without the step before it that encodes descriptors, and what that step knows of each, by its place; (None, {}) where this is not how Triton is built."""
    launcher: Any = getattr(kernel, "run", None)
    launch = getattr(launcher, "launch", None)
    if launch is None or not hasattr(kernel, "packed_metadata") or not hasattr(kernel, "function"):
        return None, {}
    if list(inspect.signature(type(launcher).__call__).parameters) not in ([*_LAUNCHER, "args"], [*_LAUNCHER, *_HOOKS, "args"]):  # fmt: skip
        return None, {}
    if inspect.isbuiltin(launch):  # no descriptors
        return launcher, {}
    if not inspect.isfunction(launch):
        return None, {}
    known = inspect.getclosurevars(launch).nonlocals
    if set(known) != {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return None, {}
    bare = copy(launcher)
    bare.launch = known["launcher"]
    return bare, dict(zip(sorted(known["tensordesc_indices"]), known["tensordesc_meta"], strict=True))


def _watched() -> bool:
    """Whether somebody wants to be told of launches, and is given Triton's own account of them."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))  # fmt: skip


def _check(args: tuple[Any, ...]) -> None:
    """The checks of descriptors that `describe` leaves out."""
    for arg in args:
        if type(arg) is TensorDescriptor:
            arg.__post_init__()


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
    if len(_kinds) >= _MOST:  # seeds, and rows of ragged batches
        _kinds.clear()
    _kinds[number] = found
    return found


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A matrix for TMA, without the checks that `TensorDescriptor.from_tensor` makes every time; a quick kernel makes them where the matrix is new to it.

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
