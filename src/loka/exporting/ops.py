"""The two operations of a converted module, a cast and a product, as a traced graph spells them. Activations are cast by amax, multiply, clamp, cast.

AtenOps     aten: a product of dequantised operands on a CPU, torch's own scaled product (cuBLASLt) on a GPU
OnnxOps     QuantizeLinear -> DequantizeLinear -> Gemm, the pattern that runtimes replace by an FP8 product
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, QTensor, Spec, expand_scale, scale_from_amax
from loka.kernels import registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import MatmulCall, prepare

ROWS = 1024  # a product of so many rows stands for all when a kernel is asked whether it can


class Ops(Protocol):
    """How a cast and a product are written."""

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Why a product cannot be written, or None."""
        ...

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """A weight as the product reads it."""
        ...

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Any:
        """x [M, K] in low precision."""
        ...

    def multiply(self, a: Any, weight: QTensor, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
        """a [M, K] @ weight [N, K]^T. fast_accum: sums stay in the tensor cores, as in the kernel it stands for: what they round away there decides casts behind it."""
        ...


class AtenOps:
    """Plain torch.

    Args:
        device: where the package will run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.gemm = device, "torch" if device.type == "cuda" else "reference"
        for op in ("quantize", "scaled_mm"):
            registry.load(op)

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Formats that are no type of torch, and products that torch's own GEMM does not have."""
        if reason := _refuse_formats(a, weight.spec):
            return reason
        n, k = weight.shape
        verdict = registry.backend("scaled_mm", self.gemm).supports(MatmulCall(ROWS, k, n, a, weight.spec, dtype), self.device)  # fmt: skip
        return None if verdict else f"torch's own product {verdict.reason}, and no kernel of ours can be packaged"

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """Padded and with its scales ordered as the product reads them."""
        return prepare(weight, a, backend=self.gemm)

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> QTensor:
        """By the law."""
        return quantize(x, spec, scale=scale, backend="compiled")

    def multiply(self, a: QTensor, weight: QTensor, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
        """On the backend that was asked when the module was made; the law without its autocast block, which would be a graph of its own."""
        if self.gemm == "reference":
            return (_values_of(a) @ _values_of(weight).T).to(dtype)
        from loka.kernels.scaled_mm import torch as own

        return own.run_packaged(a, weight, out_dtype=dtype, fast_accum=fast_accum)


class OnnxOps:
    """Nodes of ONNX, opset 21. They compute nothing in eager: a module with these is only traced."""

    OPSET = 21
    _TYPES = {E4M3: (17, torch.float8_e4m3fn), E5M2: (19, torch.float8_e5m2)}  # noqa: RUF012 - a table

    def refuse(self, a: Spec, weight: QTensor, dtype: torch.dtype) -> str | None:
        """Formats that ONNX has no element type for."""
        return _refuse_formats(a, weight.spec)

    def hold(self, weight: QTensor, a: Spec) -> QTensor:
        """As it is."""
        return weight

    def quantize(self, x: Tensor, spec: Spec, scale: Tensor | None) -> Tensor:
        """QuantizeLinear and DequantizeLinear: the values that x has in low precision."""
        x = x.float()
        width = x.shape[1]
        across = width if spec.block in (TENSOR, ROW) else spec.block.cols
        if spec.block.rows > 1 and spec.block != TENSOR:
            raise ValueError(f"{spec} of an activation has no spelling in ONNX: several rows share a scale")
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
        """Gemm and not MatMul: onnxruntime 1.31 turns a MatMul behind two DequantizeLinear into an integer product, and then refuses its own graph for being FP8."""
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
    """data * scale, block by block.

    Not `q.dequantize()`: that repeats scales along the columns, and Inductor (torch 2.13) on a CPU reads beyond them where the width is no multiple of the block: at 200 columns
    `x * scales[torch.arange(200) // 128]` compiled is off by 1e33.
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
            return f"{spec} is emulated here and has no type outside; e4m3 and e5m2 have"
    return None
