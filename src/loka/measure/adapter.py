"""The benchmark's adapters (`loka.measure.op`) by op, among them scaled_mm and quantize. Add new ones to ADAPTERS."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import conformance, inputs
from loka.measure.attention import Attention
from loka.measure.beam import BeamAttention
from loka.measure.conformance import Conformance
from loka.measure.dots import Dots
from loka.measure.fused import compiled, judge_twice
from loka.measure.grouped import GroupedMm
from loka.measure.inputs import Shape
from loka.measure.interaction import Interaction
from loka.measure.layer import FusedLinear
from loka.measure.masked import MaskedAttention
from loka.measure.mixed_dots import MixedDots
from loka.measure.norm import NormQuantize
from loka.measure.op import Op
from loka.measure.route import Route
from loka.measure.tables import EmbeddingBag, EmbeddingUpdate
from loka.measure.timing import Thunk
from loka.measure.topk import Topk


class ScaledMm(Op[MatmulCall]):
    """GEMM of quantized operands. See `parse_variant` for variants."""

    op = "scaled_mm"
    DIMENSIONS = ("m", "k", "n")
    VARIANTS = (
        "e4m3:tensor@e4m3:tensor|fast",
        "e4m3:row@e4m3:row|fast",
        "e4m3:1x128@e4m3:128x128",
        "e4m3:1x128@e4m3:1x128",
    )

    def parse(self, shape: Shape, variant: str) -> MatmulCall:
        """See `Op.parse`: M, K, N and `a@b`."""
        return parse_variant(variant, shape)

    def spell(self, call: MatmulCall) -> str:
        """See `Op.spell`."""
        return f"{call.a}@{call.b}{'|fast' if call.fast_accum else ''}|{str(call.out_dtype).removeprefix('torch.')}"

    def adopt(self, call: MatmulCall) -> MatmulCall:
        """See `Op.adopt`. Where the scales of operands came from makes no difference to a product."""
        return replace(call, a=replace(call.a, mode="dynamic"), b=replace(call.b, mode="dynamic"))

    def operands(
        self, call: MatmulCall, *, seed: int, distribution: str, device: torch.device
    ) -> tuple[QTensor, QTensor]:
        """Draw two QTensors."""
        return inputs.matmul_operands(call, seed=seed, distribution=distribution, device=device)

    def thunk(self, backend: Backend, call: MatmulCall, operands: tuple[QTensor, QTensor]) -> Thunk:
        """Return the GEMM alone: weight prepared, activation scales in the order that the backend reads directly."""
        a, b = operands
        if getattr(backend, "OUTER_MAJOR_SCALES", False) and a.spec.block.rows == 1:
            a = replace(a, scale=a.scale.t().contiguous().t())
        weight = registry.prepare_for(backend, b, a.spec)
        return lambda: backend.run(a, weight, out_dtype=call.out_dtype, fast_accum=call.fast_accum)

    def check(self, backend: Backend, call: MatmulCall, operands: tuple[QTensor, QTensor]) -> Conformance:
        """Check with the weight plain and prepared, and with the scales of `a` in both storage orders."""
        checked = conformance.check_scaled_mm(backend, call, *operands)
        if not checked or not getattr(backend, "OUTER_MAJOR_SCALES", False):
            return checked
        timed = self.thunk(backend, call, operands)
        return conformance.judge_runs(
            timed, conformance.law(*operands), conformance.tolerance(call), call.out_dtype, poison=False
        )

    def baseline(self, call: MatmulCall, operands: tuple[QTensor, QTensor]) -> Thunk:
        """Return a bf16 linear on the dequantized operands."""
        x, w = (q.dequantize(torch.bfloat16) for q in operands)
        return lambda: torch.nn.functional.linear(x, w)

    def check_baseline(self, call: MatmulCall, operands: tuple[QTensor, QTensor]) -> Conformance:
        """Check against the exact result of the bf16 values."""
        expected = conformance.law_of_values(*(q.dequantize(torch.bfloat16) for q in operands))
        allowed = conformance.baseline_tolerance(torch.bfloat16, call.k)
        return conformance.judge_runs(self.baseline(call, operands), expected, allowed, torch.bfloat16)

    def bytes_moved(self, call: MatmulCall) -> int:
        """Count 8-bit operands and the output. Scales are left out, so it is a lower bound."""
        return (call.m + call.n) * call.k + call.m * call.n * call.out_dtype.itemsize

    def flops(self, call: MatmulCall) -> int:
        """Return 2 M K N."""
        return 2 * call.m * call.k * call.n


def parse_variant(text: str, shape: Shape) -> MatmulCall:
    """Parse `a@b[|fast][|OUT]`, OUT being bfloat16, float16 or float32, e.g. `e4m3:row@e4m3:row|fast|float32`."""
    specs, *options = text.split("|")
    left, at, right = specs.partition("@")
    outputs = [option for option in options if option != "fast"]
    if not at or len(outputs) > 1 or not set(outputs) <= {"bfloat16", "float16", "float32"}:
        raise ValueError(
            f"variant {text!r} is not SPEC@SPEC[|fast][|bfloat16 or float16 or float32]; e.g. e4m3:row@e4m3:row|fast"
        )
    dtype = getattr(torch, outputs[0]) if outputs else torch.bfloat16
    return MatmulCall(*shape, Spec.parse(left), Spec.parse(right), dtype, "fast" in options)


class Quantize(Op[QuantizeCall]):
    """Quantization of x [M, K]; N is ignored.

    A variant is a Spec, `spec+transposed spec` for the pair that the backward pass needs, or `+transposed spec` alone.
    """

    op = "quantize"
    DIMENSIONS = ("m", "k")
    VARIANTS = ("e4m3:tensor:static", "e4m3:row", "e4m3:1x128", "e4m3:128x128", "e4m3:1x128+e4m3:1x128")

    def parse(self, shape: Shape, variant: str) -> QuantizeCall:
        """See `Op.parse`: M, K and a Spec."""
        spec, _, transpose = variant.partition("+")
        parsed, parsed_t = (Spec.parse(text) if text else None for text in (spec, transpose))
        return QuantizeCall(*shape[:2], parsed, transpose=parsed_t)

    def spell(self, call: QuantizeCall) -> str:
        """See `Op.spell`."""
        return f"{call.spec or ''}{f'+{call.transpose}' if call.transpose else ''}"

    def operands(self, call: QuantizeCall, *, seed: int, distribution: str, device: torch.device) -> Tensor:
        """Draw the input tensor."""
        return inputs.quantize_input(call, seed=seed, distribution=distribution, device=device)

    def thunk(self, backend: Backend, call: QuantizeCall, operands: Tensor) -> Thunk:
        """Return the quantizer, compiled if the backend asks for it. Given scales are computed beforehand."""
        options = self._options(call, operands)

        def tensors(x: Tensor) -> list[Tensor]:  # torch.compile returns tensors, not QTensors
            made = backend.run(x, call.spec, **options)
            return [part for q in made if q is not None for part in (q.data, q.scale)]

        if getattr(backend, "COMPILE_TO_TIME", False):
            fused = compiled(tensors, operands.device)
            return lambda: fused(operands)
        return lambda: backend.run(operands, call.spec, **options)

    def _options(self, call: QuantizeCall, x: Tensor) -> dict[str, Any]:
        options: dict[str, Any] = {"transpose": call.transpose} if call.transpose else {}
        if call.spec and call.spec.mode != "dynamic":
            options["scale"] = inputs.quantized(x, call.spec).scale
        if call.transpose and call.transpose.mode != "dynamic":
            options["transpose_scale"] = inputs.quantized(x.T, call.transpose).scale
        return options

    def check(self, backend: Backend, call: QuantizeCall, operands: Tensor) -> Conformance:
        """Check for the same bits as the reference, plain and with poisoned allocations."""
        options = self._options(call, operands)
        expected = registry.backend("quantize", "reference").run(operands, call.spec, **options)

        def judge(made: Any) -> Conformance:
            pairs = zip(made, expected, strict=True)
            return conformance.worst_of(conformance.check_quantized(q, ref) for q, ref in pairs if ref is not None)

        return judge_twice(lambda: backend.run(operands, call.spec, **options), judge)

    def baseline(self, call: QuantizeCall, operands: Tensor) -> Thunk:
        """Return a copy of the bf16 tensor, i.e. the cost of reading and writing it."""
        target = torch.empty_like(operands)
        return lambda: target.copy_(operands)

    def check_baseline(self, call: QuantizeCall, operands: Tensor) -> Conformance:
        """Check that the copy equals its source."""
        return Conformance.within(float(not self.baseline(call, operands)().equal(operands)), 0.0, "the copy differs")

    def bytes_moved(self, call: QuantizeCall) -> int:
        """Count a 16-bit input and 8-bit outputs. A second read, which some dynamic scales need, is not counted."""
        return call.m * call.k * (call.in_dtype.itemsize + (call.spec is not None) + (call.transpose is not None))


ADAPTERS: dict[str, Op[Any]] = {
    adapter.op: adapter
    for adapter in (
        ScaledMm(),
        Quantize(),
        NormQuantize(),
        FusedLinear(),
        GroupedMm(),
        BeamAttention(),
        Topk(),
        Attention(),
        MaskedAttention(),
        Interaction(),
        Dots(),
        MixedDots(),
        Route(),
        EmbeddingBag(),
        EmbeddingUpdate(),
    )
}


def adapter_for(op: str) -> Op[Any]:
    """Return the adapter of an op."""
    if op not in ADAPTERS:
        raise ValueError(f"no benchmark for op {op!r}; there are {', '.join(ADAPTERS)}")
    return ADAPTERS[op]
