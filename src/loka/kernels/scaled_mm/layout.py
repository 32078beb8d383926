"""What library GEMMs ask of their operands: aligned, padded, scales in their order. Every step keeps the values.

Zero padding is exact: zeros add nothing to a dot product, and padded rows of the output are cut off. It costs a copy, so it happens only where
a shape needs it (13, 27, 479), never at multiples of the granule, and for a prepared weight (`loka.kernels.prepared`) once. What needs nothing done comes back as
the tensor it was.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.backend import YES, Verdict, no, require_library
from loka.kernels.strides import GRANULE


def up(size: int, granule: int) -> int:
    """Round up to a multiple."""
    return -(-size // granule) * granule


def aligned(data: Tensor, rows: int, cols: int) -> Tensor:
    """8-bit data, row-major, starting on a 16-byte boundary, padded with zeros to [rows, cols]."""
    missing_rows, missing_cols = rows - data.shape[0], cols - data.shape[1]
    if missing_rows or missing_cols:
        return F.pad(data.contiguous().view(torch.uint8), (0, missing_cols, 0, missing_rows)).view(data.dtype)
    if torch.compiler.is_compiling():  # an offset cannot be traced; what a traced quantiser writes starts on a boundary
        return data.contiguous()
    return data.clone() if data.is_contiguous() and data.storage_offset() % GRANULE else data.contiguous()


def with_ones(scale: Tensor, count: int) -> Tensor:
    """Scales with `count` ones after the last along the last dimension; itself for none, where F.pad would copy."""
    return F.pad(scale, (0, count), value=1.0) if count else scale


def row_scales(q: QTensor, rows: int) -> Tensor:
    """One scale per row [rows, 1] of an operand scaled per row or per tensor; padded rows get 1."""
    if q.scale.dim() == 2 and q.shape[0] == rows:
        return q.scale.contiguous()
    scale = q.scale.repeat(q.shape[0]) if q.scale.dim() == 0 else q.scale.reshape(-1)
    return with_ones(scale, rows - q.shape[0]).reshape(rows, 1).contiguous()


def outer_major(scale: Tensor, rows: int) -> Tensor:
    """1x128 scales [rows, K / 128] stored with the rows contiguous; free where the quantiser already wrote them so."""
    groups = scale.shape[1]
    if scale.shape[0] == rows and scale.stride() == (1, rows):
        return scale
    # as_strided: of a single group every stride counts as contiguous, and the library compares strides
    return with_ones(scale.t(), rows - scale.shape[0]).contiguous().as_strided((groups, rows), (rows, 1)).t()


def cut(out: Tensor, m: int, n: int) -> Tensor:
    """The part of a padded output that was asked for."""
    return out if out.shape == (m, n) else out[:m, :n].contiguous()


def float_scales(*specs: Spec) -> Verdict:
    """Whether the scales are float32: what these libraries multiply by on FP8 data before Blackwell."""
    for spec in specs:
        if spec.scale not in ("f32", "pow2"):
            return no(f"takes float32 scales, not {spec.scale} ({spec})")
    return YES


def fp8_gpu(device: torch.device, minimum: tuple[int, int] = (8, 9), *, only: int | None = None) -> Verdict:
    """Whether a device is a GPU with FP8 tensor cores, of one major version where only that has the kernel."""
    if device.type != "cuda":
        return no(f"needs a CUDA GPU, not {device.type}")
    capability = _capability(-1 if device.index is None else device.index)
    if not capability:
        return no("needs a CUDA GPU, and this machine has none")
    seen = ".".join(capability.split())
    major, minor = (int(part) for part in capability.split())
    if (major, minor) < minimum:
        return no(f"needs compute capability {minimum[0]}.{minimum[1]} or newer, this GPU has {seen}")
    if only is not None and major != only:
        return no(f"exists for compute capability {only}.x only, this GPU has {seen}")
    return YES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability(index: int) -> str:
    """ "9 0", or "" without CUDA: a string, so that torch.compile can take it as a constant."""
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(None if index < 0 else index)
    return f"{major} {minor}"


def library(module: str, extra: str) -> Verdict:
    """Whether an optional library can be imported, in a form torch.compile can trace."""
    reason = _import_failure(module, extra)
    return no(reason) if reason else YES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _import_failure(module: str, extra: str) -> str:
    return _verdict(module, extra).reason


@cache  # Python does not remember failed imports, and `auto` asks on every call
def _verdict(module: str, extra: str) -> Verdict:
    return require_library(module, extra)
