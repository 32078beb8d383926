"""`file_amax` in one launch: one program per operand, which finds its tensors by a table of their addresses.

A table is made once for every set of operands and cached by the addresses. It cannot be made during CUDA graph capture;
plain torch runs there if no step has run before.
"""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.formats import E4M3, SMALLEST_SCALE
from loka.kernels.strides import next_power_of_2
from loka.kernels.triton_launcher import quick

if TYPE_CHECKING:
    from loka.kernels.amax_history import Magnitudes

_Tables = dict[tuple[object, ...], tuple[Tensor, int]]
_MOST_TABLES = 16  # models that are trained in one process at the same time
_tables: _Tables = {}
_captured: _Tables = {}  # tables that a CUDA graph reads in every replay: some KiB each, never freed


@triton.jit
def _pointer(table_ptr, column: tl.constexpr):
    return tl.load(table_ptr + column).to(tl.pointer_type(tl.float32))


@triton.jit
def _number(table_ptr, column: tl.constexpr):
    return tl.load(table_ptr + column).to(tl.int32).to(tl.float32, bitcast=True)


@quick
@triton.jit
def _file(table_ptr, MAX: tl.constexpr, SMALLEST: tl.constexpr, LONGEST: tl.constexpr):
    row = table_ptr + tl.program_id(0) * 8
    history, largest_ptr, pending_ptr = _pointer(row, 0), _pointer(row, 1), _pointer(row, 2)
    scale_ptr, saturated_ptr = _pointer(row, 3), _pointer(row, 4)
    length, headroom, floor = tl.load(row + 5), _number(row, 6), _number(row, 7)
    i = tl.arange(0, LONGEST)
    pending, scale = tl.load(pending_ptr), tl.load(scale_ptr)
    over = (pending > scale * MAX) & (tl.load(largest_ptr) > 0)
    old = tl.load(history + i, i < length, 0.0)
    moved = tl.load(history + i - 1, (i > 0) & (i < length), 0.0)
    moved = tl.where(i == 0, pending, moved)
    new = tl.where(pending > 0, moved, old)
    largest = tl.max(new, 0)
    reached = tl.maximum(largest * headroom, floor)
    next_scale = tl.maximum(tl.div_rn(reached, MAX), SMALLEST) + (reached - reached)  # NaN if it is not finite
    tl.debug_barrier()  # every thread has read its neighbor's value
    tl.store(history + i, new, i < length)
    tl.store(largest_ptr, largest)
    tl.store(scale_ptr, tl.where(largest > 0, next_scale, scale))
    tl.store(saturated_ptr, tl.load(saturated_ptr) + over.to(tl.float32))
    tl.store(pending_ptr, 0.0)


def file_amax(operands: "Sequence[Magnitudes]") -> bool:
    """Update operands of one device. Returns False, doing nothing, if a table would have to be made during capture."""
    facts = [(*(t.data_ptr() for t in (one.history, one.largest, one.pending, one.scale, one.saturated)), len(one.history), one.headroom, one.floor) for one in operands]  # fmt: skip
    device = operands[0].history.device
    key = (device, *facts)
    found = _tables.get(key) or _captured.get(key)
    capturing = _is_capturing(device)
    if found is None:
        if capturing:
            return False
        rows = [[*fact[:6], _bits(fact[6]), _bits(fact[7])] for fact in facts]
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        while len(_tables) >= _MOST_TABLES:
            _tables.pop(next(iter(_tables)), None)  # another thread may have popped it
        found = _tables[key] = (table, next_power_of_2(max(fact[5] for fact in facts)))
    if capturing:
        _captured[key] = found
    table, longest = found
    with torch.cuda.device_of(table):
        _file[(len(facts),)](table, E4M3.max, SMALLEST_SCALE, longest, num_warps=1 if longest <= 1024 else 4)
    return True


def _bits(value: float) -> int:
    """Return the bits of a float32 as a signed integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
