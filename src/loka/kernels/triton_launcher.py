"""Launch Triton kernels with little host time.

`kernel[grid](...)` binds the arguments, computes the specialization of each, joins these into a string, looks the
compiled kernel up by it, and encodes every TMA descriptor. For kernels like ours, whose forty arguments are mostly
constants, that takes 100 us of Python and more, while the GPU may be waiting for the host. Here the compiled kernel is
found by the few facts that can differ between two calls of a program:

    tensor       its dtype, and whether it starts at a multiple of 16 bytes
    descriptor   the dtype of its tensor, and the block
    integer      whether it is 1, a multiple of 16, and how many bits it needs
    float        nothing
    constant     its value

On NVIDIA GPUs Triton specializes for nothing else. A call that differs in any of these goes through Triton, which
compiles or finds the kernel, and is cached. A launch with any other kind of argument (a tuple, a NumPy number) always
goes through Triton. Triton's settings (`TRITON_DEBUG`, instrumentation) take effect at the first launch of a kernel:
changing them later does not affect kernels that are already compiled.

A compiled kernel caches the tensor maps that Triton encoded from descriptors. A map is reused if everything it is made
of is the same: the kernel and the argument's position (which determine dtype, block, swizzle and GPU), the address,
sizes, strides and the remaining fields of the descriptor. A map owns no memory, it only refers to it: weights stay in
place, and torch's allocator returns the same addresses step after step. The launch itself is Triton's, with addresses
instead of tensors. If launch hooks are installed (by a profiler), or Triton's internals differ from the releases this
was written for (3.6 and 3.7), everything is left to Triton.
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

_CACHE_LIMIT = 4096  # entries of each cache below, which is cleared when it is full
_runtime, _driver = triton.knobs.runtime, triton.runtime.driver
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
            plain = list(args)
            key, described = self.read(plain, options)
            found = None if key is None else self._compiled.get(key)
            if found is not None:
                found.launch(grid, args, plain, described)
                return
            _check_descriptors(args)
            made = self.jitted[grid](*args, **options)
            if made is not None and key is not None and len(args) == self._arguments:
                if len(self._compiled) >= _CACHE_LIMIT:
                    self._compiled.clear()
                self._compiled[key] = Compiled(made)

        return launch

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
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None, []
        return tuple(key), described


class Compiled:
    """A compiled kernel and a cache of the tensor maps that it was launched with.

    Args:
        kernel: Triton's `CompiledKernel`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launcher, self._descriptor_meta = _take_launcher_apart(kernel)
        self._maps: dict[tuple[Any, ...], list[Any]] = {}

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], plain: list[Any], described: list[tuple[Any, ...]]) -> None:  # fmt: skip
        """Launch the kernel.

        Args:
            grid: one to three sizes.
            args: the arguments as Triton takes them.
            plain, described: the arguments after `Quick.read`, and what it returned for the descriptors.
        """
        grid = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if self._launcher is None or _has_launch_hooks():
            _check_descriptors(args)
            self.kernel[grid](*args)
            return
        for key in reversed(described):  # a descriptor expands to several arguments; last first keeps positions valid
            position = key[0]
            plain[position : position + 1] = self._maps.get(key) or self._encode(key, args[position])
        active, kernel = _driver.active, self.kernel
        stream = active.get_current_stream(_current_device())
        self._launcher(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *plain)

    def _encode(self, key: tuple[Any, ...], descriptor: TensorDescriptor) -> list[Any]:
        """Return the arguments that Triton makes of a descriptor: a tensor map, sizes and strides.

        Without TMA they contain the tensor itself, which must not be cached.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        _check_descriptors((descriptor,))
        meta = self._descriptor_meta[key[0]]
        made: list[Any] = make_tensordesc_arg(descriptor, meta)
        if meta is not None:
            if len(self._maps) >= _CACHE_LIMIT:
                self._maps.clear()
            self._maps[key] = made
        return made


_LAUNCHER = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
_HOOKS = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]


def _take_launcher_apart(kernel: Any) -> tuple[Any, dict[int, Any]]:
    """Return Triton's launcher without its step that encodes descriptors, and that step's metadata by position.

    Returns (None, {}) if Triton's internals are not as expected.
    """
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


def _has_launch_hooks() -> bool:
    """Return True if a launch hook is installed; such launches go through Triton, which calls the hooks."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))  # fmt: skip


def _check_descriptors(args: tuple[Any, ...]) -> None:
    """Run the checks of descriptors that `describe` skips."""
    for arg in args:
        if type(arg) is TensorDescriptor:
            arg.__post_init__()


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
    if len(_integer_kinds) >= _CACHE_LIMIT:  # seeds and the row counts of ragged batches are unbounded
        _integer_kinds.clear()
    _integer_kinds[number] = found
    return found


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix, without the checks of `TensorDescriptor.from_tensor`.

    A `quick` kernel runs those checks the first time it sees the matrix.

    Args:
        x: a matrix whose rows start at multiples of 16 bytes.
        block: the rows and columns that a program loads at once.

    Returns:
        A kernel argument.
    """
    made = _new(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, x.shape, x.stride(), block
    return made


_new = TensorDescriptor.__new__
