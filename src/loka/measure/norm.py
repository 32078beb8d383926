"""Benchmark adapter of norm_quantize: norm + activation + quantization in one pass. Rivals: the quantizer alone, a
copy.

A variant is `NORM>SPEC|option`, e.g. `rms>e4m3:row|hard_swish`. Options: an activation, affine, residual, transpose,
and a dtype for the unquantized output; without quantization it is `NORM>DTYPE|option`. Gradients are `gradient NORM>...` (`norm_gradient`). Compared with float64
(`rounding`): the float32 reference and a kernel may round an element between two codes differently.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.fused_linear.call import NORMALIZED_SCALE
from loka.kernels.norm_quantize import reference
from loka.kernels.norm_quantize.call import EPS, NormCall, NormGradientCall, NormResult
from loka.kernels.quantize.call import QuantizeCall
from loka.measure import conformance, inputs, norm_gradient
from loka.measure.conformance import Conformance, worst_of
from loka.measure.fused import (
    ACTIVATE,
    FLOAT32,
    STEEPEST,
    bf16_norm,
    block_norm,
    compiled,
    draw_dropout,
    dropped_share,
    judge_amax,
    judge_twice,
    option,
    split_variant,
)
from loka.measure.inputs import Shape
from loka.measure.op import DTYPES, Op
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Rival, Thunk

STATISTICS = 4 * FLOAT32  # error of a mean or a reciprocal deviation: a sum over a row, an approximate square root


class NormQuantize(Op[NormCall | NormGradientCall]):
    """Norm + activation + quantization of x [M, K]; N is ignored."""

    op = "norm_quantize"
    VARIANTS = tuple(
        f"{norm}>{spec}|hard_swish" for norm in ("rms", "layer", "block") for spec in ("e4m3:row", "e4m3:1x128", "e4m3:tensor:static")
    )  # fmt: skip
    DIMENSIONS = ("m", "k")
    OPTIONS = frozenset({"affine", "residual", "transpose", *DTYPES})

    def parse(self, shape: Shape, variant: str) -> NormCall | NormGradientCall:
        """See `Op.parse`: M, K and `NORM>SPEC`."""
        m, k, _ = shape
        norm, spec, options, activation = split_variant(variant, set(self.OPTIONS))
        if norm.startswith(norm_gradient.HEAD):
            return norm_gradient.parse(m, k, norm, spec, options, activation)
        outputs = [DTYPES[option] for option in (spec, *sorted(options)) if option in DTYPES]
        return NormCall(
            m, k, None if spec in DTYPES else Spec.parse(spec), norm, activation or "none", "affine" in options,
            "residual" in options, out_dtype=outputs[0] if outputs else None, transpose="transpose" in options,
        )  # fmt: skip

    def spell(self, call: NormCall | NormGradientCall) -> str:
        """See `Op.spell`."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.spell(call)
        options = [call.activation, *(name for name in ("affine", "residual", "transpose") if getattr(call, name))]
        plain = [name for name, dtype in DTYPES.items() if dtype == call.out_dtype]
        if call.spec is None:
            return "|".join([f"{call.norm}>{plain[0]}", *options])
        return "|".join([f"{call.norm}>{call.spec}", *options, *plain])

    def operands(self, call: NormCall | NormGradientCall, *, seed: int, distribution: str, device: torch.device) -> Any:
        """Draw x, and the residual, parameters and scale if the call has them."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.draw_operands(call, seed=seed, distribution=distribution, device=device)
        options: dict[str, Any] = {"device": device, "dtype": call.in_dtype}
        x = inputs.draw(call.m, call.k, distribution=distribution, seed=3 * seed, **options)
        made: dict[str, Any] = {"x": x, "residual": None, "weight": None, "bias": None, "scale": None}
        made |= option(draw_dropout(call, seed=seed, device=device))
        if call.residual:
            made["residual"] = inputs.draw(call.m, call.k, seed=3 * seed + 1, **options)
        if call.affine:
            noise = inputs.draw(2, call.k, seed=3 * seed + 2, **options)
            made |= {"weight": 1 + 0.3 * noise[0], "bias": 0.3 * noise[1]}
        if call.spec is not None and call.spec.mode != "dynamic":
            made["scale"] = torch.full((), NORMALIZED_SCALE, device=device)
        return made

    def thunk(self, backend: Backend, call: NormCall | NormGradientCall, operands: Any) -> Thunk:
        """See `Op.thunk`."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.make_thunk(backend, call, operands)
        x, rest = operands["x"], {key: value for key, value in operands.items() if key != "x"}
        return lambda: backend.run(x, call, **rest)

    def exact(self, call: NormCall | NormGradientCall, operands: Any) -> Any:
        """See `Op.exact`. What follows a residual is exact given the sum that a backend returns: None."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.exact(call, operands)
        return self._exact(call, operands["x"], operands) if operands["residual"] is None else None

    def shows_nan(self, call: NormCall | NormGradientCall) -> bool:
        """See `Op.shows_nan`. Of a gradient, a mask may take a NaN away."""
        return isinstance(call, NormCall) and not call.dropout

    def compare(
        self, backend: Backend, call: NormCall | NormGradientCall, operands: Any, exact: Callable[[], Any]
    ) -> Conformance:
        """Check q, h and the 16-bit output against float64, plain and with poisoned allocations."""
        if isinstance(call, NormGradientCall):
            made: NormGradientCall = call
            judged = judge_twice(
                self.thunk(backend, made, operands), lambda result: norm_gradient.judge(result, made, exact())
            )
            raised = norm_gradient.judge_amax(backend, made, operands, exact) if judged else judged
            return worst_of([judged, raised])

        def judge(result: NormResult) -> Conformance:
            h = cast(Tensor, result.h)  # operands are never FP8 here
            y = exact() if operands["residual"] is None else self._exact(call, h, operands)
            error = FLOAT32 * y.abs().nan_to_num(0.0).amax(1, keepdim=True).expand_as(y) if y.numel() else y
            verdicts = []
            if call.spec is not None:
                verdicts.append(judge_rounded(cast(QTensor, result.q), y, error, what="q"))
            if call.transpose:
                verdicts.append(judge_rounded(cast(QTensor, result.q_t), y.T, error.T, what="q_t"))
            if call.out_dtype is not None:
                assert result.y is not None
                verdicts.append(judge_rounded(result.y, y, error, what="y"))
            if operands["residual"] is not None:
                total = operands["x"].double() + operands["residual"].double()
                verdicts.append(judge_rounded(h, total, torch.zeros_like(total), what="h"))
            return worst_of([*verdicts, *_judge_statistics(result, call, h.double())])

        verdict = judge_twice(self.thunk(backend, call, operands), judge)
        return worst_of([verdict, self._judge_amax(backend, call, operands)]) if verdict else verdict

    def _judge_amax(self, backend: Backend, call: NormCall, operands: dict[str, Any]) -> Conformance:
        """Check the amax, which is of y before dropout."""
        x = operands["x"]
        if not x.numel() or call.spec is None or call.spec.mode == "dynamic":
            return Conformance(True, 0.0, 1.0)
        h = x if operands["residual"] is None else (x.float() + operands["residual"].float()).to(x.dtype)
        largest = self._exact(call, h, {**operands, "dropout": None}).abs().nan_to_num(0.0, 0.0, 0.0).max()
        rest = {key: value for key, value in operands.items() if key != "x"}
        slack = (FLOAT32 * largest).clamp(min=1e-30)
        return judge_amax(lambda amax: backend.run(x, call, **rest, amax=amax), largest, slack)

    def _exact(self, call: NormCall, h: Tensor, operands: dict[str, Any]) -> Tensor:
        h, eps = h.double(), EPS[call.norm]
        p = block_norm(h, eps)[0] if call.norm == "block" else bf16_norm(h, call.norm)
        weight, bias = operands["weight"], operands["bias"]
        p = p if weight is None else p * weight.double()
        p = p if bias is None else p + bias.double()
        y: Tensor = ACTIVATE[call.activation](p) * dropped_share(operands.get("dropout"), call.m, call.k)
        return y

    def adopt(self, call: Any) -> NormCall | NormGradientCall | None:
        """See `Op.adopt`. FP8 inputs, gradients beside a residual, and heads are not checked."""
        if isinstance(call, NormGradientCall):
            return None if call.kept is not None or call.residual else call
        made: NormCall = call
        return None if made.kept is not None or made.heads else made

    def baseline(self, call: NormCall | NormGradientCall, operands: Any) -> Thunk:
        """Return norm + activation in bf16 (RMS norm in place of block norm), without quantization."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.make_baseline(call, operands)
        x = operands["x"]
        run = compiled(lambda t: ACTIVATE[call.activation](bf16_norm(t, call.norm)), x.device)
        return lambda: run(x)

    def check_baseline(self, call: NormCall | NormGradientCall, operands: Any) -> Conformance:
        """Check against float64, allowing one rounding between norm and activation."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.judge_baseline(self.baseline(call, operands)(), call, operands)
        p = bf16_norm(operands["x"].double(), call.norm)
        y = ACTIVATE[call.activation](p)
        return judge_rounded(self.baseline(call, operands)(), y, STEEPEST * 2.0**-7 * p.abs() + 1e-6)

    def rivals(self, call: NormCall | NormGradientCall, sets: Sequence[Any]) -> list[Rival]:
        """Return the quantizer alone, and a copy."""
        if isinstance(call, NormGradientCall):
            return []
        first = sets[0]["x"]
        copies: list[Thunk] = [partial(torch.empty_like(o["x"]).copy_, o["x"]) for o in sets]
        rivals: list[Rival] = [("copy", copies, Conformance(True, 0.0, 0.0))]
        alone = QuantizeCall(call.m, call.k, call.spec, call.in_dtype)
        backend = registry.backend("quantize", "triton")
        if call.spec is not None and backend.supports(alone, first.device):
            thunks: list[Thunk] = [partial(backend.run, o["x"], call.spec, scale=o["scale"]) for o in sets]
            expected = quantize(first, call.spec, scale=sets[0]["scale"])
            rivals.append(("quantize", thunks, conformance.check_quantized(thunks[0]()[0], expected)))
        return rivals

    def bytes_moved(self, call: NormCall | NormGradientCall) -> int:
        """Count x, the FP8 outputs, the residual and h, and y."""
        if isinstance(call, NormGradientCall):
            return norm_gradient.bytes_moved(call)
        item = call.in_dtype.itemsize
        extra = 2 * item * call.residual + (call.out_dtype.itemsize if call.out_dtype else 0)
        return call.m * call.k * (item + (call.spec is not None) + call.transpose + extra)


def _judge_statistics(result: NormResult, call: NormCall, h: Tensor) -> list[Conformance]:
    """Judge the mean and the reciprocal deviation, which backward takes from forward."""
    _, mean, rstd = reference._normalize(h, call.norm, EPS[call.norm])
    verdicts = [judge_rounded(result.rstd, rstd, STATISTICS * rstd, what="rstd")]
    if mean is not None:
        if result.mean is None:
            return [*verdicts, Conformance.failed("it returns no mean")]
        largest = h.abs().amax(1, keepdim=True) if h.numel() else mean
        verdicts.append(judge_rounded(result.mean, mean, STATISTICS * largest, what="the mean"))
    return verdicts
