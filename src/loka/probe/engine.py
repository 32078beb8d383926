"""Engine: how a candidate quantises and multiplies, and the gate it must pass before its errors are looked at.

An engine is a quantiser and a GEMM of the kernels' registry under one name. Anything else with the same two verbs can be evaluated too:
a kernel of one's own, or a broken one, to see that it is found.

The gate asks whether the engine computes what it claims, at the rows and widths the site really has, since a kernel can be right at one shape and
wrong at the next (`loka.measure.gate`):

    quantiser   equal to the law, bit for bit, on float32 and bf16 inputs
    GEMM        within the accumulation's error of the law on the same quantised operands, every element of it, in every one of 36 calls

It says nothing about whether FP8 is accurate enough. That is measured on the site's own distributions, and neither replaces the other: a scale that is 10 % off
passes a bound of 0.2, and a kernel that is right on zero-mean inputs may still lose a sum of one sign.
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

GATE_DTYPES = (torch.float32, torch.bfloat16)  # what Probe's samples are, and what a model hands on


@dataclass(frozen=True)
class Engine:
    """The quantiser and the GEMM that errors are measured with.

    Args:
        name: in reports.
        quantize: (x, spec) -> QTensor.
        matmul: a backend of scaled_mm, or a module like one.

    Example:
        >>> probe.evaluate(backends=[Engine("mine", loka.formats.quantize, my_module)])
    """

    name: str
    quantize: Callable[[Tensor, Spec], QTensor]
    matmul: Backend

    @classmethod
    def named(cls, name: str) -> "Engine":
        """A backend of scaled_mm with the quantiser that goes with it; emulation is emulation throughout."""
        quantizer = partial(quantize, backend="reference" if name == "reference" else "auto")
        return cls(name, quantizer, registry.backend("scaled_mm", name))

    def multiply(self, qa: QTensor, qb: QTensor, operands: GemmWay) -> Tensor:
        """The product alone."""
        out: Tensor = self.matmul.run(qa, qb, out_dtype=out_dtype(qa.device), fast_accum=operands.fast_accum)
        return out


def out_dtype(device: torch.device) -> torch.dtype:
    """What a product is written in: bf16 on a GPU, as layers do and every library can; float32 in emulation."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Gate:
    """Asks `loka.measure.gate` about engines, which judges every kernel on every call once."""

    def refuse(
        self, engine: Engine, operands: GemmWay, shape: tuple[int, int, int], device: torch.device
    ) -> str | None:
        """Why a candidate may not run a GEMM of that shape, whether the backend declines the call itself or is wrong on it; or None."""
        m, k, n = shape
        call = operands.call(m, k, n, out_dtype(device))
        verdict = engine.matmul.supports(call, device)
        if not verdict:
            return verdict.reason
        for rows, spec in ((m, operands.a), (n, operands.b)):
            for dtype in GATE_DTYPES:
                found = judge_quantizer(engine.quantize, QuantizeCall(rows, k, spec, dtype), device)
                if not found:
                    return f"fails the conformance gate, quantising {dtype} to {spec}: {found.reason}"
        found = judge_backend("scaled_mm", engine.matmul, call, device)
        return None if found else f"fails the conformance gate {found.reason}"
