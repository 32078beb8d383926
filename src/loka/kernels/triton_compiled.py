"""A compiled Triton kernel, launched without the Python that Triton runs for every launch.

Triton's launcher encodes every TMA descriptor, may allocate scratch memory, and calls a C function. A compiled kernel
here calls that C function itself, and caches the tensor maps that Triton encoded from descriptors. A map is reused if
everything it is made of is the same: the kernel and the argument's position (which determine dtype, block, swizzle and
GPU), the address, sizes, strides and the remaining fields of the descriptor. A map owns no memory, it only refers to
it: weights stay in place, and torch's allocator returns the same addresses step after step.

If launch hooks are installed (by a profiler), or Triton's internals differ from the releases this was written for (3.6
and 3.7), everything is left to Triton. A kernel that needs scratch memory is launched by Triton's launcher.
"""

import inspect
from copy import copy
from functools import lru_cache
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

CACHE_LIMIT = 4096  # entries of a cache, which is cleared when it is full
_runtime, _driver = triton.knobs.runtime, triton.runtime.driver
_new = TensorDescriptor.__new__


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


def check_descriptors(args: tuple[Any, ...]) -> None:
    """Run the checks of descriptors that `describe` skips."""
    for arg in args:
        if type(arg) is TensorDescriptor:
            arg.__post_init__()


class Compiled:
    """A compiled kernel and a cache of the tensor maps that it was launched with.

    Args:
        kernel: Triton's `CompiledKernel`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launcher, self._descriptor_meta = _take_launcher_apart(kernel)
        if self._launcher is not None:
            self._start, self._fixed, self._flat = _shorten(kernel, self._launcher)
            self._current_stream = _driver.active.get_current_stream
        self._maps: dict[tuple[Any, ...], list[Any]] = {}

    def is_left_to_triton(self) -> bool:
        """Return True if Triton must launch: its internals are unknown, or a launch hook is installed."""
        if self._launcher is None:
            return True
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))  # fmt: skip

    def launch_through_triton(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launch the kernel by Triton, with its arguments as Triton takes them."""
        check_descriptors(args)
        self.kernel[grid](*args)

    def launch(self, grid: tuple[int, ...], device: int, args: list[Any]) -> None:
        """Launch the kernel on the current stream.

        Args:
            grid: three sizes.
            device: the index of the current GPU.
            args: as Triton's C function takes them: addresses instead of tensors, maps instead of descriptors.
        """
        x, y, z = grid
        if self._flat:
            self._start(x, y, z, self._current_stream(device), *self._fixed, *args)
        else:
            self._start(x, y, z, self._current_stream(device), *self._fixed, args)

    def map_of(self, key: tuple[Any, ...], descriptor: TensorDescriptor) -> list[Any]:
        """Return the arguments that Triton makes of a descriptor, cached.

        Args:
            key: the position among the arguments, address, sizes, strides and other fields.
            descriptor: what `key` describes.
        """
        return self._maps.get(key) or self._encode(key, descriptor)

    def map_at(self, position: int, address: int, x: Tensor, block: list[int]) -> list[Any]:
        """Return `map_of` for a matrix at an address. The block is always the same at a position."""
        key = (position, address, x.shape, x.stride())
        return self._maps.get(key) or self._encode(key, describe(x, block))

    def _encode(self, key: tuple[Any, ...], descriptor: TensorDescriptor) -> list[Any]:
        """Return the arguments that Triton makes of a descriptor: a tensor map, sizes and strides.

        Without TMA they contain the tensor itself, which must not be cached.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        check_descriptors((descriptor,))
        meta = self._descriptor_meta[key[0]]
        made: list[Any] = make_tensordesc_arg(descriptor, meta)
        if meta is not None:
            if len(self._maps) >= CACHE_LIMIT:
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


# What the launcher's `__call__` does for a kernel without scratch memory, by release.
_CALL = "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
_CALL_3_6 = _CALL + "global_scratch, profile_scratch, *args)"
_CALL_3_7 = _CALL + ("kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, global_scratch, profile_scratch, " "self.arg_annotations, self.kernel_signature, args)")  # fmt: skip


def _shorten(kernel: Any, launcher: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return a function that launches a kernel, and its arguments between the stream and those of the kernel.

    The function is the C function in Triton's launcher where it is called in a way that is known, else the launcher.

    Returns:
        The function, the arguments, and whether those of the kernel follow one by one instead of in a list.
    """
    kind: Any = type(launcher)
    call = _source_of(kind)
    if getattr(launcher, "global_scratch_size", 1) == 0 and getattr(launcher, "profile_scratch_size", 1) == 0:
        if _CALL_3_7 in call:
            how = (
                launcher.launch_cooperative_grid,
                launcher.launch_pdl,
                kernel.packed_metadata,
                None,
                None,
                None,
                None,
                None,
            )
            return launcher.launch, (kernel.function, *how, launcher.arg_annotations, launcher.kernel_signature), False
        if _CALL_3_6 in call:
            how = (
                launcher.launch_cooperative_grid,
                launcher.launch_pdl,
                None,
                None,
                kernel.packed_metadata,
                None,
                None,
                None,
            )
            return launcher.launch, (kernel.function, *how), True
    return launcher, (kernel.function, kernel.packed_metadata, None, None, None), True


@lru_cache
def _source_of(launcher: Any) -> str:
    """Return the source of a launcher's `__call__` in one line; "" if there is none."""
    try:
        return " ".join(inspect.getsource(launcher.__call__).split())
    except OSError:
        return ""
