"""Engine: how a candidate quantizes and multiplies, and the conformance gate it must pass before it is measured.

An engine is a quantizer and a GEMM backend under one name. It usually comes from the kernel registry, but any object
with the same two methods can be evaluated: a custom kernel, or a deliberately broken one to check that the gate rejects
it.

The gate checks that the engine computes what it claims, at the site's actual shape, because a kernel can be right at
one shape and wrong at the next (`loka.measure.gate`, which judges each kernel once per call signature):

    quantizer   bit-identical to the reference on float32 and bf16 inputs
    GEMM        every element within accumulation error of the reference on the same quantized operands, in 39 calls

The gate does not say whether FP8 is accurate enough; that is measured on the site's own distributions. Neither check
replaces the other: a scale that is 10 % off passes an error bound of 0.2, and a kernel that is right on zero-mean
inputs may still lose precision in a sum whose terms all have the same sign.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.quantize import QuantizeCall, quantize
from loka.kernels.scaled_mm import GemmWay
from loka.measure.gate import judge_backend, judge_quantizer

# one object each, so that engines share what they quantized
QUANTIZERS = {name: partial(quantize, backend=name) for name in ("reference", "auto")}
GATE_DTYPES = (torch.float32, torch.bfloat16)  # the dtypes of Probe's samples and of a model's activations


@dataclass(frozen=True)
class Engine:
    """The quantizer and the GEMM with which errors are measured.

    Args:
        name: the name shown in reports.
        quantize: (x, spec) -> QTensor.
        matmul: a backend of scaled_mm, or an object with the same interface.

    Example:
        >>> probe.evaluate(backends=[Engine("mine", loka.formats.quantize, my_module)])
    """

    name: str
    quantize: Callable[[Tensor, Spec], QTensor]
    matmul: Backend

    @classmethod
    def named(cls, name: str) -> "Engine":
        """Return the engine for a scaled_mm backend. "reference" also quantizes with the reference implementation."""
        quantizer = QUANTIZERS["reference" if name == "reference" else "auto"]
        return cls(name, quantizer, registry.backend("scaled_mm", name))

    def multiply(self, qa: QTensor, qb: QTensor, operands: GemmWay) -> Tensor:
        """Multiply two quantized operands."""
        out: Tensor = self.matmul.run(qa, qb, out_dtype=out_dtype(qa.device), fast_accum=operands.fast_accum)
        return out

    def refuse(
        self, operands: GemmWay, shape: tuple[int, int, int], device: torch.device, *, quantized: int | None = None
    ) -> str | None:
        """Return why it may not run a GEMM (not supported or wrong), or None if it may.

        Args:
            operands: how it runs.
            shape: its M, K and N.
            device: the device it runs on.
            quantized: along K, if fewer elements are quantized at once; see `quantizer_calls`.
        """
        m, k, n = shape
        call = operands.call(m, k, n, out_dtype(device))
        verdict = self.matmul.supports(call, device)
        if not verdict:
            return verdict.reason
        for one in quantizer_calls(operands, shape, quantized=quantized):
            found = judge_quantizer(self.quantize, one, device)
            if not found:
                return f"fails the conformance gate, quantizing {one.in_dtype} to {one.spec}: {found.reason}"
        found = judge_backend("scaled_mm", self.matmul, call, device)
        return None if found else f"fails the conformance gate {found.reason}"


def quantizer_calls(
    operands: GemmWay, shape: tuple[int, int, int], *, quantized: int | None = None
) -> list[QuantizeCall]:
    """Return how the operands of a GEMM are quantized.

    Args:
        operands: how it runs.
        shape: its M, K and N.
        quantized: along K, if fewer elements are quantized at once. A step quantizes the operands of a weight gradient
            as transposes, by another kernel, which is judged there; only Probe has them as matrices, of a few rows.
    """
    m, k, n = shape
    k = min(k, quantized or k)
    return [
        QuantizeCall(rows, k, spec, dtype) for rows, spec in ((m, operands.a), (n, operands.b)) for dtype in GATE_DTYPES
    ]


def out_dtype(device: torch.device) -> torch.dtype:
    """Return the output dtype of products: bf16 on a GPU, which every backend supports; float32 in emulation."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
