"""Launches of which everything but the tensors is known beforehand.

A model calls an op with the same sizes step after step. What follows from sizes, strides, dtypes and options (the grid,
the integers, the constants, the shapes of outputs) is computed once, in a function that is cached by them:

    @planned
    def _plan(m, k, stride, device) -> Plan:         numbers in, never a tensor: all that a launch depends on is in the key
        return Plan(q=rows_maker(m, k, 16, dtype, device), launch=bind(_kernel, (m,), m, k, stride, 128))

    plan = _plan(*x.shape, x.stride(0), x.device)    a call of the op
    q = plan.q()
    plan.launch(x, q)

What is left of a launch is the address of each tensor. The compiled kernel is found by the current GPU, by the dtypes,
and by whether all addresses are multiples of 16 bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import TensorWrapper

from loka.kernels.triton_compiled import CACHE_LIMIT, Compiled, describe
from loka.kernels.triton_launcher import Quick

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_NOTHING: Mapping[int, Any] = {}


def bind(
    kernel: Any, grid: tuple[int, ...], *rest: Any, views: Mapping[int, torch.dtype] = _NOTHING, blocks: Mapping[int, list[int]] = _NOTHING, **options: Any
) -> "Bound":  # fmt: skip
    """Return a launch of a kernel that lacks only its tensors.

    Args:
        kernel: made by `triton.jit`, wrapped by `quick` or not. Its first parameters are the tensors.
        grid: one to three sizes.
        rest: the arguments after the tensors: integers, floats and constants.
        views: position of a tensor -> the dtype that the kernel reads it as.
        blocks: position of a matrix that the kernel takes as a TMA descriptor -> the rows and columns that a program
            loads at once.
        options: of the launch.

    Returns:
        A function of the tensors, in the order of the parameters; None for an absent one.

    Example:
        >>> launch = bind(copy, (1,), 64, 64, num_warps=4)
        >>> launch(x, y)
    """
    kind = Bound if isinstance(kernel, Quick) else _BoundPlainly
    return kind(kernel, (*grid, 1, 1)[:3], rest, views, blocks, options)


class Bound:
    """See `bind`."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], rest: tuple[Any, ...], views: Mapping[int, torch.dtype], blocks: Mapping[int, list[int]], options: dict[str, Any]
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._rest, self._options = kernel, grid, rest, options
        self._views = views
        self._blocks = sorted(blocks.items(), reverse=True)  # a descriptor expands to several arguments: last first
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current GPU and stream."""
        device = _current_device()
        key: list[Any] = [device]
        args: list[Any] = []
        every = 0
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                args.append(None)
            else:
                address = tensor.data_ptr()
                every |= address
                key.append(tensor.dtype)
                args.append(address if tensor.is_cuda else tensor)  # Triton checks the others
        if every & 15:
            key += [tensor is None or tensor.data_ptr() & 15 == 0 for tensor in tensors]
        found = self._compiled.get(tuple(key))
        if found is None or found.is_left_to_triton():
            self._launch_first(tuple(key), tensors)
            return
        for position, block in self._blocks:
            tensor = tensors[position]
            if tensor is not None:
                args[position : position + 1] = found.map_at(position, tensor.data_ptr(), tensor, block)
        args += self._rest
        found.launch(self._grid, device, args)

    def _launch_first(self, key: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> None:
        """Launch the kernel with all its arguments, and remember what it was compiled to."""
        found = self._kernel.launch(self._grid, self._arguments(tensors), self._options)
        if found is not None:
            if len(self._compiled) >= CACHE_LIMIT:
                self._compiled.clear()
            self._compiled[key] = found

    def _arguments(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Return all arguments of the kernel, as Triton takes them."""
        args: list[Any] = list(tensors)
        for position, dtype in self._views.items():
            args[position] = None if args[position] is None else TensorWrapper(args[position], dtype)
        for position, block in self._blocks:
            args[position] = None if args[position] is None else describe(args[position], block)
        return *args, *self._rest


class _BoundPlainly(Bound):
    """Of a kernel that `quick` left alone, because it is interpreted or runs on an AMD GPU."""

    def __call__(self, *tensors: Tensor | None) -> None:
        self._kernel[self._grid](*self._arguments(tensors), **self._options)
