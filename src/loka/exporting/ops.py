"""The two operations of a converted module, a cast and a GEMM, in the form that is traced.

AtenOps     aten ops: a GEMM of dequantized operands on a CPU, torch's own scaled GEMM (cuBLASLt) on a GPU
OnnxOps     QuantizeLinear -> DequantizeLinear -> Gemm, the pattern that runtimes replace by an FP8 GEMM
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, QTensor, Spec, expand_scale, scale_from_amax
from loka.kernels import registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import MatmulCall, prepare

ROWS = 1024  # rows of the call with which a kernel is asked whether it supports a GEMM


class Ops(Protocol):
    """The cast and the GEMM of an export format."""

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Return why a GEMM cannot be exported, or None."""
        ...

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """Return the weight as the GEMM reads it."""
        ...

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Any:
        """Quantize x [M, K]."""
        ...

    def multiply(self, a: Any, weight: QTensor, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
        """Return a [M, K] @ weight [N, K]^T.

        fast_accum: accumulate in the tensor cores, like the kernel it replaces; its rounding affects later casts.
        """
        ...


class AtenOps:
    """Plain torch ops for the device that the package will run on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gemm = device, "torch" if device.type == "cuda" else "reference"
        for op in ("quantize", "scaled_mm"):
            registry.load(op)

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Reject formats that are not dtypes of torch, and GEMMs that torch's own backend does not support."""
        if reason := _refuse_formats(a, weight.spec):
            return reason
        n, k = weight.shape
        verdict = registry.backend("scaled_mm", self.gemm).supports(MatmulCall(ROWS, k, n, a, weight.spec, dtype), self.device)  # fmt: skip
        return None if verdict else f"torch's own GEMM {verdict.reason}, and loka's kernels cannot be packaged"

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """Return the weight padded, with its scales in the order that the GEMM reads."""
        return prepare(weight, a, backend=self.gemm)

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> QTensor:
        """Quantize x like the reference."""
        return quantize(x, spec, scale=scale, backend="compiled")

    def multiply(self, a: QTensor, weight: QTensor, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
        """Multiply; on a CPU like the reference, without its autocast block, which would be traced as a subgraph."""
        if self.gemm == "reference":
            return (_values_of(a) @ _values_of(weight).T).to(dtype)
        from loka.kernels.scaled_mm import torch as own

        return own.run_packaged(a, weight, out_dtype=dtype, fast_accum=fast_accum)


class OnnxOps:
    """ONNX nodes, opset 21. They compute nothing in eager mode: a module that uses them can only be traced."""

    OPSET = 21
    _TYPES = {E4M3: (17, torch.float8_e4m3fn), E5M2: (19, torch.float8_e5m2)}  # noqa: RUF012 - a table

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Reject formats that ONNX has no element type for."""
        return _refuse_formats(a, weight.spec)

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """Return the weight unchanged."""
        return weight

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Tensor:
        """Return the dequantized values of x: QuantizeLinear, then DequantizeLinear."""
        x = x.float()
        width = x.shape[1]
        across = width if spec.block in (TENSOR, ROW) else spec.block.cols
        if spec.block.rows > 1 and spec.block != TENSOR:
            raise ValueError(f"{spec} of an activation is not supported by ONNX: several rows share a scale")
        wide = F.pad(x, (0, -width % across)) if width % across else x
        blocks = wide if across == width else wide.reshape(-1, across)
        if scale is None:
            amax = blocks.abs().amax((0, 1)) if spec.block == TENSOR else blocks.abs().amax(1)
            scale = scale_from_amax(amax, spec)
        code, kind = self._TYPES[spec.format]
        attributes: dict[str, Any] = {} if scale.dim() == 0 else {"axis": 0}
        q = self._node("QuantizeLinear", (blocks, scale), kind, blocks.shape, output_dtype=code, **attributes)
        values = self._node("DequantizeLinear", (q, scale), torch.float32, blocks.shape, **attributes)
        return values if across == width else values.reshape(wide.shape)[:, :width]

    def multiply(self, a: Tensor, weight: QTensor, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
        """Multiply with a Gemm node.

        Not MatMul: onnxruntime 1.31 turns a MatMul after two DequantizeLinear into an integer GEMM, and then rejects
        its own graph because it is FP8.
        """
        values = self._values(weight)
        product = self._node("Gemm", (a, values), torch.float32, (a.shape[0], weight.shape[0]), transB=1)
        return product if dtype == torch.float32 else product.to(dtype)

    def _values(self, weight: QTensor) -> Tensor:
        data, scale, (rows, width) = weight.data, weight.scale, weight.shape
        if scale.dim() == 0:
            return self._node("DequantizeLinear", (data, scale), torch.float32, data.shape)
        if weight.spec.block == ROW:
            return self._node("DequantizeLinear", (data, scale.reshape(-1)), torch.float32, data.shape, axis=0)
        one = self._node("DequantizeLinear", (data, torch.ones((), device=data.device)), torch.float32, data.shape)
        return one * expand_scale(scale, (rows, width), weight.spec.block)

    def _node(self, name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
        made: Tensor = torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape, version=self.OPSET)
        return made


def _values_of(q: QTensor) -> Tensor:
    """Return data * scale, block by block.

    Not `q.dequantize()`, which repeats scales along the columns: Inductor (torch 2.13) on a CPU reads beyond them if
    the width is not a multiple of the block. At 200 columns, `x * scales[torch.arange(200) // 128]` compiled is off by
    1e33.
    """
    values, block = q.data.float(), q.spec.block
    if block in (TENSOR, ROW):
        return values * q.scale
    rows, columns = values.shape
    high, wide = (min(size, whole) for size, whole in zip((block.rows, block.cols), values.shape, strict=True))
    values = F.pad(values, (0, -columns % wide, 0, -rows % high))
    parts = values.reshape(-1, high, values.shape[1] // wide, wide) * q.scale[:, None, :, None]
    return parts.reshape(values.shape)[:rows, :columns]


def _refuse_formats(*specs: Spec) -> str | None:
    for spec in specs:
        if spec.format not in (E4M3, E5M2) or spec.scale == "e4m3":
            return f"{spec} is emulated and has no type in the exported format; expected e4m3 or e5m2"
    return None
