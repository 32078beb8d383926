"""Operand layouts that library GEMMs require: alignment, padding, scale order. No step changes a value.

Zero padding is exact: zeros add nothing to a dot product, and padded rows of the output are cut off. It costs a copy,
so only shapes that need it (13, 27, 479) are padded, and a prepared weight (`loka.kernels.prepared`) only once. A
tensor that needs nothing is returned as is.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.backend import YES, Verdict, no, require_library
from loka.kernels.strides import GRANULE


def up(size: int, granule: int) -> int:
    """Round up to a multiple of `granule`."""
    return -(-size // granule) * granule


def aligned(data: Tensor, rows: int, cols: int) -> Tensor:
    """Return 8-bit data row-major, starting on a 16-byte boundary, zero-padded to [rows, cols]."""
    missing_rows, missing_cols = rows - data.shape[0], cols - data.shape[1]
    if missing_rows or missing_cols:
        return F.pad(data.contiguous().view(torch.uint8), (0, missing_cols, 0, missing_rows)).view(data.dtype)
    if torch.compiler.is_compiling():  # an offset cannot be traced; a traced quantizer's output starts on a boundary
        return data.contiguous()
    return data.clone() if data.is_contiguous() and data.storage_offset() % GRANULE else data.contiguous()


def with_ones(scale: Tensor, count: int) -> Tensor:
    """Append `count` ones along the last dimension. Returns `scale` itself for 0, where F.pad would copy."""
    return F.pad(scale, (0, count), value=1.0) if count else scale


def row_scales(q: QTensor, rows: int) -> Tensor:
    """Return one scale per row, [rows, 1], of an operand scaled per row or per tensor; padded rows get 1."""
    if q.scale.dim() == 2 and q.shape[0] == rows:
        return q.scale.contiguous()
    scale = q.scale.repeat(q.shape[0]) if q.scale.dim() == 0 else q.scale.reshape(-1)
    return with_ones(scale, rows - q.shape[0]).reshape(rows, 1).contiguous()


def outer_major(scale: Tensor, rows: int) -> Tensor:
    """Return 1x128 scales [rows, K / 128] with contiguous rows; no copy if the quantizer wrote them this way."""
    groups = scale.shape[1]
    if scale.shape[0] == rows and scale.stride() == (1, rows):
        return scale
    # as_strided: a single group counts as contiguous with any stride, but the library compares strides
    return with_ones(scale.t(), rows - scale.shape[0]).contiguous().as_strided((groups, rows), (rows, 1)).t()


def cut(out: Tensor, m: int, n: int) -> Tensor:
    """Return the unpadded [m, n] part of an output."""
    return out if out.shape == (m, n) else out[:m, :n].contiguous()


def float_scales(*specs: Spec) -> Verdict:
    """Check that the scales are float32, which these libraries require for FP8 data before Blackwell."""
    for spec in specs:
        if spec.scale not in ("f32", "pow2"):
            return no(f"takes float32 scales, not {spec.scale} ({spec})")
    return YES


def fp8_gpu(device: torch.device, minimum: tuple[int, int] = (8, 9), *, only: int | None = None) -> Verdict:
    """Check for a GPU with FP8 tensor cores; `only` restricts it to one major compute capability."""
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
    """Return "9 0", or "" without CUDA. A string, so that torch.compile can take it as a constant."""
    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(None if index < 0 else index)
    return f"{major} {minor}"


def library(module: str, extra: str) -> Verdict:
    """Check whether an optional library can be imported, in a form that torch.compile can trace."""
    reason = _import_failure(module, extra)
    return no(reason) if reason else YES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _import_failure(module: str, extra: str) -> str:
    return _verdict(module, extra).reason


@cache  # Python does not cache failed imports
def _verdict(module: str, extra: str) -> Verdict:
    return require_library(module, extra)
