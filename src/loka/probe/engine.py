"""Engine: how a candidate quantises and multiplies, and the gate it must pass before its errors are looked at.

An engine is a quantiser and a GEMM of the kernels' registry under one name. Anything else with the same two verbs can be evaluated too:
a kernel of one's own, or a broken one, to see that it is found.

The gate asks whether the engine computes what it claims, at the site's own widths, since a kernel can be right at one shape and wrong
at the next:

    quantiser   equal to the law, bit for bit
    GEMM        within `loka.measure.tolerance` of the law on the same quantised operands, twice (the second time on poisoned memory)

on zero-mean inputs of three kinds and two sizes: N(0, 1); rows of very different size; a few large columns, times 2^12. It says nothing about
whether FP8 is accurate enough. That is measured on the site's own distributions, and neither replaces the other: a scale that is 10 % off
passes a bound of 0.2, and a kernel that is right on zero-mean inputs may still lose a sum of one sign.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loka.dispatch import Operands
from loka.formats import QTensor, Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import MatmulCall
from loka.measure import Conformance, check_quantized, check_scaled_mm, inputs

GATE_INPUTS = (("normal", 1.0), ("lognormal_rows", 1.0), ("outlier_channels", 2.0**12))
GATE_ELEMENTS = 1 << 20  # of the largest operand of the gate: rows are cut to it, widths never
GATE_ROWS = 256


@dataclass(frozen=True)
class Engine:
    """A quantiser and a GEMM."""

    name: str
    quantize: Callable[[Tensor, Spec], QTensor]
    matmul: Backend

    @classmethod
    def named(cls, name: str) -> "Engine":
        """A backend of scaled_mm with the quantiser that goes with it; emulation is emulation throughout."""
        quantizer = partial(quantize, backend="reference" if name == "reference" else "auto")
        return cls(name, quantizer, registry.backend("scaled_mm", name))

    def multiply(self, qa: QTensor, qb: QTensor, operands: Operands) -> Tensor:
        """The product alone."""
        out: Tensor = self.matmul.run(qa, qb, out_dtype=out_dtype(qa.device), fast_accum=operands.fast_accum)
        return out


def out_dtype(device: torch.device) -> torch.dtype:
    """What a product is written in: bf16 on a GPU, as layers do and every library can; float32 in emulation."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Gate:
    """Checks every (engine, call) once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, MatmulCall], str | None] = {}

    def refuse(
        self, engine: Engine, operands: Operands, shape: tuple[int, int, int], device: torch.device
    ) -> str | None:
        """Why a candidate may not be evaluated on a GEMM of shape (rows, contracted, columns), or None."""
        call = MatmulCall(*fit_rows(shape), operands.a, operands.b, out_dtype(device), operands.fast_accum)
        verdict = engine.matmul.supports(call, device)
        if not verdict:
            return verdict.reason
        key = (id(engine.matmul), call)
        if key not in self._known:
            self._known[key] = _explain(engine, call, device)
        return self._known[key]


def fit_rows(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Fewer rows, with the same remainder by 128: a kernel's tail is where it goes wrong."""
    m, k, n = shape
    limit = max(16, min(GATE_ROWS, GATE_ELEMENTS // max(k, n, 1)))
    if m <= limit:
        return shape
    return max(1, limit - limit % 128) + m % 128 if limit >= 128 else limit, k, n


def _explain(engine: Engine, call: MatmulCall, device: torch.device) -> str | None:
    try:
        for distribution, size in GATE_INPUTS:
            found = check_engine(engine, call, distribution, size, device)
            if not found:
                return f"fails the conformance gate on {distribution} inputs: {found.reason}"
    except Exception as error:  # a backend that crashes is a refusal like any other
        return f"fails in the conformance gate: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


@torch.no_grad()
def check_engine(engine: Engine, call: MatmulCall, distribution: str, size: float, device: torch.device) -> Conformance:
    """Quantiser, then GEMM, on inputs of one kind."""
    quantized = []
    for part, (rows, spec) in enumerate(((call.m, call.a), (call.n, call.b))):
        x = size * inputs.draw(rows, call.k, distribution=distribution, seed=part, device=device)
        q = engine.quantize(x, spec)
        same = check_quantized(q, quantize_by_law(x, spec))
        if not same:
            return Conformance(False, same.error, same.tolerance, f"quantising to {spec}: {same.reason}")
        quantized.append(q)
    return check_scaled_mm(engine.matmul, call, *quantized)
