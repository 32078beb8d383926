"""cuBLASLt without a workspace: the same products as torch's op, without the memset in front of each of them.

torch gives cuBLASLt a workspace. With one, Hopper's kernels hand tiles out by a counter in it, and a memset clears that
counter before every product: another launch of about 2 us. Without one, tiles are assigned beforehand. In CUDA graphs on
an H200 that takes (row scales, bf16 out, beside torch's op):

    4,096 x 1,408 x 1,408    16.3 us instead of 17.9         8,192 x 1,408 x 1,408    27.9 instead of 29.9
    4,096 x 1,408 x 4,224    37.8 us instead of 39.8         8,192 x 1,408 x 4,224    71.8 instead of 73.9

Without a workspace K cannot be split either, which few tiles need: `fills` says whether there are enough. `auto` never
takes this backend, because torch.compile can look into torch's op and not into a call of a C library.

The library is the one that torch has loaded; ctypes calls its C functions. A call has a plan (descriptors and the
algorithm) that depends on sizes, formats and strides only; each call sets the addresses of the scales in it.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, QTensor
from loka.kernels.backend import Verdict, no
from loka.kernels.op import fake_of, invoke, torch_op
from loka.kernels.prepared import laid_out
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, row_scales
from loka.kernels.scaled_mm.torch import lay_out
from loka.kernels.scaled_mm.torch import prepare as prepare  # the layout is torch's, so that both share a weight
from loka.kernels.strides import cdiv

_OLDEST = 120900  # the first cuBLASLt with a scale per row
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F, _SCALE_32F = 68, 0
# attributes of a product's descriptor (cublasLtMatmulDescAttributes_t)
_TRANSPOSE_A, _SCALE_A, _SCALE_B, _FAST, _SCALE_MODE_A, _SCALE_MODE_B = 3, 17, 18, 25, 31, 32
_PER_ROW = 3  # scale mode: one float32 for each row; 0, the default, is one for the matrix
_TILE = 128  # what its row-scaled kernels compute at once, in each direction


class _Found(ctypes.Structure):
    """An answer of cuBLASLt's heuristic (cublasLtMatmulHeuristicResult_t)."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support FP8 formats with tensor and row scales, on Hopper."""
    formats = call.a.format, call.b.format
    if not set(formats) <= {E4M3, E5M2}:
        return no(f"multiplies e4m3 and e5m2, not {call.a.format} @ {call.b.format}")
    if formats == (E5M2, E5M2):
        return no("cuBLASLt does not multiply two e5m2 operands")
    if not {call.a.block, call.b.block} <= {TENSOR, ROW}:
        return no(f"takes tensor and row scales here, not {call.a.block} x {call.b.block}")
    usable = float_scales(call.a, call.b) and fp8_gpu(device, (9, 0), only=9)
    reason = _missing() if usable else ""
    return no(reason) if reason else usable


def fills(m: int, n: int, processors: int) -> bool:
    """Return whether a product has a tile for every multiprocessor, so that splitting K would gain nothing.

    Args:
        m, n: rows and columns of the result.
        processors: multiprocessors of the GPU.

    Example:
        >>> fills(4096, 1408, 132), fills(512, 1408, 132)
        (True, False)
    """
    return cdiv(m, _TILE) * cdiv(n, _TILE) >= processors


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.scaled_mm`."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    w, scale_b = laid_out(b, "torch", a.spec, lay_out)
    x = aligned(a.data, m, w.shape[1])
    rows = not a.spec.block == b.spec.block == TENSOR
    scale_a = row_scales(a, m) if rows else a.scale
    result: Tensor = invoke(_multiply, x, w, scale_a, scale_b, rows, fast_accum, out_dtype)
    return cut(result, m, n)


@torch_op("cublaslt_scaled_mm")
def _multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, rows: bool, fast_accum: bool, out_dtype: torch.dtype
) -> Tensor:
    (m, k), n, device = a.shape, b.shape[0], a.get_device()
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    plan = _plan(m, k, n, a.dtype, b.dtype, out_dtype, rows, fast_accum, device)
    plan.run(a, b, scale_a, scale_b, out, torch._C._cuda_getCurrentRawStream(device))
    return out


@fake_of(_multiply)
def _(a, b, scale_a, scale_b, rows, fast_accum, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


class _Plan:
    """The descriptors of one kind of product, and the algorithm that cuBLASLt recommends for it.

    cuBLASLt stores matrices by columns, so it computes out^T = b a^T: its first operand is our b.
    """

    def __init__(
        self, m: int, k: int, n: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, rows: bool, fast: bool, device: int
    ) -> None:  # fmt: skip
        self.library, self.handle = _library(), _handle(device)
        self.lock = Lock()  # between setting the scales and the launch; ctypes releases the interpreter's lock
        self.product = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self.product), c_int(_COMPUTE_32F), c_int(_SCALE_32F))
        self._set(_TRANSPOSE_A, c_int(1))
        self._set(_FAST, c_int8(fast))
        if rows:
            self._set(_SCALE_MODE_A, c_int(_PER_ROW))
            self._set(_SCALE_MODE_B, c_int(_PER_ROW))
        self.b, self.a = self._layout(b, k, n), self._layout(a, k, m)
        self.out = self._layout(out, n, m)
        self.one, self.zero = c_float(1.0), c_float(0.0)
        self.what = f"{m} x {k} x {n}, {a} @ {b} -> {out}"
        self.algorithm: Any = None  # asked for in the first call: the heuristic reads the addresses of the scales

    def run(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, stream: int) -> None:
        """Queue the product on a stream."""
        with self.lock:
            self._set(_SCALE_A, c_void_p(scale_b.data_ptr()))
            self._set(_SCALE_B, c_void_p(scale_a.data_ptr()))
            if self.algorithm is None:
                self.algorithm = self._recommended()
            y = c_void_p(out.data_ptr())
            self._call(
                "cublasLtMatmul", self.handle, self.product, byref(self.one), c_void_p(b.data_ptr()), self.b,
                c_void_p(a.data_ptr()), self.a, byref(self.zero), y, self.out, y, self.out,
                byref(self.algorithm), None, c_size_t(0), c_void_p(stream),
            )  # fmt: skip

    def __del__(self) -> None:
        for layout in (self.a, self.b, self.out):
            self.library.cublasLtMatrixLayoutDestroy(layout)
        self.library.cublasLtMatmulDescDestroy(self.product)

    def _recommended(self) -> Any:
        preference, found, count = c_void_p(), _Found(), c_int()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))  # its default is no workspace
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.product, self.b, self.a, self.out, self.out, preference,
            c_int(1), byref(found), byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if count.value == 0:
            raise RuntimeError(f"cuBLASLt has no algorithm without a workspace for {self.what}; hint: backend='torch'")
        return found.algorithm

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(made), c_int(_TYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )  # fmt: skip
        return made

    def _set(self, attribute: int, value: Any) -> None:
        self._call("cublasLtMatmulDescSetAttribute", self.product, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))  # fmt: skip

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self.library, name)(*args):
            raise RuntimeError(f"{name} failed with status {status} of cublasStatus_t")


_plan = lru_cache(maxsize=4096)(_Plan)  # a few hundred bytes each; ragged batches make many


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLASLt of torch's CUDA version, which torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


@cache
def _handle(device: int) -> c_void_p:
    made = c_void_p()
    with torch.cuda.device(device):
        if status := _library().cublasLtCreate(byref(made)):
            raise RuntimeError(f"cublasLtCreate failed with status {status} of cublasStatus_t")
    return made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing() -> str:
    """Return why the library cannot be used, empty if it can."""
    try:
        found = _library()
        found.cublasLtGetVersion.restype = c_size_t
        version = found.cublasLtGetVersion()
    except (OSError, AttributeError) as error:
        return f"cuBLASLt cannot be loaded ({error})"
    return "" if version >= _OLDEST else f"needs cuBLASLt {_OLDEST} or newer, not {version}"
