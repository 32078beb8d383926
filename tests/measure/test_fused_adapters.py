"""The benchmark's views of the fused ops: they accept the reference, notice what is wrong, and count what must move."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loka.formats import QTensor, Spec
from loka.kernels.fused_linear import reference as layer
from loka.kernels.fused_linear.call import FusedCall
from loka.kernels.norm_quantize import reference as norm
from loka.measure import bench
from loka.measure.adapter import adapter_for
from loka.measure.gate import judge_backend
from loka.measure.rounding import judge_rounded

CPU = torch.device("cpu")
LAYERS = [
    "e4m3:tensor@e4m3:tensor>e4m3:tensor:static",
    "e4m3:row@e4m3:row>e4m3:1x128|silu|bias|keep|transpose",
    "e4m3:row@e4m3:tensor>bfloat16|relu|nonorm|keep",
    "e4m3:row@e4m3:row>e5m2:tensor:static|none|nonorm|bias",
    "gradient>e4m3:tensor:delayed+e4m3:tensor:delayed",
    "gradient>e5m2:1x128+e4m3:1x128|silu|bias",
    "gradient>e4m3:1x128+e4m3:1x128|relu|nonorm",
    "dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|silu|bias|amax",
    "dgrad e4m3:tensor:static@e4m3:tensor>e4m3:tensor:static|relu",
    "dgrad e4m3:tensor@e4m3:tensor>e5m2:tensor:delayed|gelu|bias|wide",
    "dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|none",
]
NORMS = [
    "rms>e4m3:row|hard_swish",
    "layer>e4m3:1x128|silu|affine|residual|bfloat16",
    "block>e4m3:tensor:static|relu",
    "rms>e5m2:row",
    "layer>e4m3:tensor:static|gelu|affine|transpose",
    "layer>bfloat16|silu|affine",
    "block>float32|relu|residual",
]
NORM_GRADIENTS = [
    "gradient layer>e4m3:tensor:delayed|silu|affine",
    "gradient rms>bfloat16|relu",
    "gradient block>e5m2:tensor:delayed|gelu_tanh",
]
EVERY = [("fused_linear", v) for v in LAYERS] + [("norm_quantize", v) for v in NORMS + NORM_GRADIENTS]
DISTRIBUTIONS = ("normal", "outlier_channels", "zero_rows", "lognormal_rows")


def prepare(op: str, variant: str, distribution: str = "normal", shape=(24, 130, 300)):
    adapter = adapter_for(op)
    (call,) = adapter.calls([shape], [variant])
    return adapter, call, adapter.operands(call, seed=3, distribution=distribution, device=CPU)


@pytest.mark.parametrize(("op", "variant"), EVERY)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_reference_conforms(op: str, variant: str, distribution: str) -> None:
    adapter, call, operands = prepare(op, variant, distribution)
    verdict = adapter.check(layer if op == "fused_linear" else norm, call, operands)
    assert verdict, verdict.reason
    assert verdict.error > 0.3  # the bound is near what rounding does, not far above it


@pytest.mark.parametrize(("op", "variant"), EVERY)
def test_the_baseline_conforms_and_a_wrong_one_does_not(op: str, variant: str, monkeypatch) -> None:
    adapter, call, operands = prepare(op, variant)
    assert adapter.check_baseline(call, operands)
    right = adapter.baseline(call, operands)

    def wrong():
        found = right()
        return tuple(part * 1.1 for part in found) if isinstance(found, tuple) else found * 1.1

    monkeypatch.setattr(adapter, "baseline", lambda call, operands: wrong)
    assert not adapter.check_baseline(call, operands)


@pytest.mark.parametrize(("op", "variant"), EVERY)
def test_calls_survive_the_trip_to_a_child(op: str, variant: str) -> None:
    adapter, call, _ = prepare(op, variant)
    assert adapter.decode(adapter.encode(call)) == call


class Wrong:
    """The reference with one thing changed."""

    def __init__(self, module, change) -> None:
        self.module, self.change = module, change

    def run(self, *operands, **options):
        return self.change(self.module.run(*operands, **options))

    def gradient(self, *operands, **options):
        return self.change(self.module.gradient(*operands, **options))

    def dgrad(self, *operands, **options):
        return self.change(self.module.dgrad(*operands, **options))


def code_off(q: QTensor) -> QTensor:
    """One element two codes away."""
    data = q.data.clone().view(torch.uint8)
    data[-1, -1] ^= 2
    return replace(q, data=data.view(q.data.dtype))


def column_off(q: QTensor) -> QTensor:
    """One column of another sign."""
    data = q.data.clone().view(torch.uint8)
    data[:, -1] ^= 0x80
    return replace(q, data=data.view(q.data.dtype))


def scale_off(q: QTensor) -> QTensor:
    return replace(q, scale=q.scale * 1.02)


@pytest.mark.parametrize("field", ["y", "y_t", "z"])
@pytest.mark.parametrize("change", [code_off, scale_off])
def test_a_wrong_layer_is_noticed(field: str, change) -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[1])
    planted = Wrong(layer, lambda result: replace(result, **{field: change(getattr(result, field))}))
    verdict = adapter.check(planted, call, operands)
    assert not verdict
    assert verdict.reason.startswith(f"{field}: ")


def test_a_layer_without_its_norm_is_noticed() -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[0])
    (other,) = adapter.calls([(24, 130, 300)], [LAYERS[0] + "|nonorm"])
    assert not adapter.check(Wrong(layer, lambda _: adapter.thunk(layer, other, operands)()), call, operands)


@pytest.mark.parametrize("variant", LAYERS[4:6])
@pytest.mark.parametrize("field", ["g", "g_t"])
def test_a_wrong_gradient_is_noticed(variant: str, field: str) -> None:
    adapter, call, operands = prepare("fused_linear", variant)
    planted = Wrong(layer, lambda result: replace(result, **{field: code_off(getattr(result, field))}))
    assert adapter.check(planted, call, operands).reason.startswith(f"{field}: ")
    planted = Wrong(layer, lambda result: replace(result, amax=result.amax * 1.001))
    assert adapter.check(planted, call, operands).reason.startswith("amax is ")


@pytest.mark.parametrize("variant", LAYERS[7:])
@pytest.mark.parametrize("field", ["g", "g_t"])
def test_a_wrong_step_of_backward_is_noticed(variant: str, field: str) -> None:
    adapter, call, operands = prepare("fused_linear", variant)
    for change in (scale_off, column_off):
        planted = Wrong(layer, lambda result, change=change: replace(result, **{field: change(getattr(result, field))}))
        assert adapter.check(planted, call, operands).reason.startswith(f"{field}: ")


def test_a_wrong_bias_gradient_of_a_step_is_noticed() -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[7])

    def one_off(result):
        return replace(result, bias=torch.cat([result.bias[:-1], result.bias[-1:] * 1.01]))

    assert adapter.check(Wrong(layer, one_off), call, operands).reason.startswith("the bias gradient: ")


def test_a_step_that_raises_no_amax_is_noticed() -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[7])

    class Silent:
        def dgrad(self, *operands, amax=None, **options):
            return layer.dgrad(*operands, **options)

    assert "amax" in adapter.check(Silent(), call, operands).reason


def test_a_step_that_returns_an_earlier_result_is_noticed() -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[7])
    found = layer.dgrad(operands.g, operands.w_t, operands.z, call, scale=operands.scale)
    assert "earlier result" in adapter.check(Wrong(layer, lambda _: found), call, operands).reason


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "variant",
    [
        "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|leaky_relu|nonorm|keep",
        "gradient>e4m3:tensor:delayed+e4m3:tensor:delayed|leaky_relu|nonorm",
        "dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|leaky_relu",
    ],
)
def test_the_slope_of_a_leaky_relu_is_the_calls_own(variant: str, slope: float) -> None:
    adapter, call, _ = prepare("fused_linear", variant)
    call = replace(call, slope=slope)
    operands = adapter.operands(call, seed=0, distribution="normal", device=CPU)

    class Usual:
        """Takes the slope to be 0.5."""

        def run(self, a, b, call, **options):
            return layer.run(a, b, replace(call, slope=0.5), **options)

        def gradient(self, dy, z, rstd, call, **options):
            return layer.gradient(dy, z, rstd, replace(call, slope=0.5), **options)

        def dgrad(self, g, w_t, z, call, **options):
            return layer.dgrad(g, w_t, z, replace(call, slope=0.5), **options)

    assert adapter.check(layer, call, operands)
    assert not adapter.check(Usual(), call, operands)


@pytest.mark.parametrize("variant", NORMS)
def test_a_wrong_norm_is_noticed(variant: str) -> None:
    adapter, call, operands = prepare("norm_quantize", variant)
    for change in (code_off, scale_off) if call.spec else ():
        planted = Wrong(norm, lambda result, change=change: replace(result, q=change(result.q)))
        assert adapter.check(planted, call, operands).reason.startswith("q: ")
    if call.out_dtype:
        planted = Wrong(norm, lambda result: replace(result, y=row_off(result.y)))
        assert adapter.check(planted, call, operands).reason.startswith("y: ")
    if call.residual:
        planted = Wrong(norm, lambda result: replace(result, h=result.h * 1.01))
        assert not adapter.check(planted, call, operands)


def row_off(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[:-1], t[-1:] * 1.02])


@pytest.mark.parametrize(
    ("variant", "field", "change"),
    [
        (NORM_GRADIENTS[0], "dx", code_off),
        (NORM_GRADIENTS[0], "dx_t", code_off),
        (NORM_GRADIENTS[0], "weight", row_off),
        (NORM_GRADIENTS[0], "bias", row_off),
        (NORM_GRADIENTS[1], "dx", row_off),
        (NORM_GRADIENTS[2], "dx_t", code_off),
    ],
)
def test_a_wrong_gradient_of_a_norm_is_noticed(variant: str, field: str, change) -> None:
    adapter, call, operands = prepare("norm_quantize", variant)
    planted = Wrong(norm, lambda result: replace(result, **{field: change(getattr(result, field))}))
    named = {"weight": "dweight", "bias": "dbias"}.get(field, field)
    assert adapter.check(planted, call, operands).reason.startswith(f"{named}: ")


def test_a_gradient_of_a_norm_that_raises_no_amax_is_noticed() -> None:
    adapter, call, operands = prepare("norm_quantize", NORM_GRADIENTS[0])

    class Silent:
        def gradient(self, *operands, amax=None, **options):
            return norm.gradient(*operands, **options)

    assert "amax" in adapter.check(Silent(), call, operands).reason


def test_shapes_are_checked() -> None:
    adapter, call, operands = prepare("fused_linear", LAYERS[2])
    verdict = adapter.check(Wrong(layer, lambda result: replace(result, y=result.y[:-1])), call, operands)
    assert verdict.reason == "y is (23, 300), expected (24, 300)"


def test_the_floor_counts_each_byte_once() -> None:
    adapter = adapter_for("fused_linear")
    inference, training, _, gradient, step = adapter.calls([(2048, 1024, 512)], adapter.VARIANTS)
    operands, tile = (2048 + 512) * 1024, 2048 * 512
    assert adapter.bytes_moved(inference) == operands + tile
    assert adapter.bytes_moved(training) == operands + 3 * tile  # y, its transpose, z
    assert adapter.bytes_moved(gradient) == 5 * tile  # dy in bf16, z; g both ways
    assert adapter.bytes_moved(step) == operands + 3 * tile  # y; g both ways
    assert (adapter.flops(inference), adapter.flops(gradient)) == (2 * 2048 * 1024 * 512, 0)
    assert adapter.flops(step) == adapter.flops(inference)
    fused = adapter_for("norm_quantize")
    plain, full = fused.calls([(64, 128, 1)], ["rms>e4m3:row", "rms>e4m3:row|residual|bfloat16"])
    assert (fused.bytes_moved(plain), fused.bytes_moved(full)) == (3 * 64 * 128, 9 * 64 * 128)


@pytest.mark.parametrize(
    ("op", "variant", "message"),
    [
        ("fused_linear", "e4m3:row>bfloat16", "expected SPEC@SPEC, dgrad SPEC@SPEC or gradient"),
        ("fused_linear", "dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|keep", "belong to forward"),
        ("fused_linear", "e4m3:row@e4m3:row", "is not HEAD>OUTPUT"),
        ("fused_linear", "e4m3:row@e4m3:row>bfloat16|mish", "not mish"),
        ("fused_linear", "e4m3:row@e4m3:row>bfloat16|relu|silu", "is not HEAD>OUTPUT"),
        ("fused_linear", "gradient>e4m3:1x128|keep", "belong to forward"),
        ("norm_quantize", "batch>e4m3:row", "norm 'batch'"),
        ("norm_quantize", "rms>e4m3:row|keep", "not keep"),
    ],
)
def test_variants_that_mean_nothing_are_refused(op: str, variant: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_for(op).calls([(4, 32, 64)], [variant])


@pytest.mark.parametrize("part", ["mean", "rstd"])
@pytest.mark.parametrize("variant", ["layer>e4m3:row|silu", "layer>e4m3:tensor:static|relu|residual"])
def test_wrong_statistics_of_a_norm_are_found(variant: str, part: str) -> None:
    adapter, call, operands = prepare("norm_quantize", variant)

    def run(*given: Any, **options: Any) -> Any:
        made = norm.run(*given, **options)
        wrong = getattr(made, part).clone()
        wrong[-1] *= 1.01
        return replace(made, **{part: wrong})

    backend = SimpleNamespace(supports=norm.supports, run=run)
    verdict = adapter.check(backend, call, operands)
    assert not verdict
    assert part in verdict.reason


@pytest.mark.parametrize("op", ["norm_quantize", "fused_linear"])
def test_the_benchmark_times_them(op: str) -> None:
    config = bench.BenchConfig(
        op=op, shapes=[(16, 128, 64)], backends=("reference",), device="cpu", repeats=3, isolate=False, seconds=60.0
    )
    record = bench.run(config, command="test")
    rows = [row for row in record.rows if row.backend == "reference"]
    assert len(rows) == len(adapter_for(op).VARIANTS)
    assert all(row.refusal is None and row.microseconds.value > 0 for row in rows)
    copies = [row for row in record.rows if row.backend == "copy"]
    assert len(copies) == (len(rows) if op == "norm_quantize" else 0)
    assert all(row.speedup.value > 0 and row.roofline_microseconds is None for row in copies)
    assert "reference" in bench.table(record)


def _lower_amax(a, b, call, *, amax=None, **given):
    """Forgets what was seen before."""
    if amax is not None:
        amax.zero_()
    return layer.run(a, b, call, amax=amax, **given)


def _halve_amax(a, b, call, *, amax=None, **given):
    seen = None if amax is None else torch.zeros_like(amax)
    result = layer.run(a, b, call, amax=seen, **given)
    if amax is not None:
        amax.copy_(torch.maximum(amax, seen / 2))
    return result


def _scale_rstd(a, b, call, **given):
    result = layer.run(a, b, call, **given)
    return replace(result, rstd=result.rstd * 1.001)


def _return_one_buffer():
    held = {}

    def run(a, b, call, **given):
        result = layer.run(a, b, call, **given)
        return replace(result, rstd=held.setdefault(result.rstd.shape, torch.empty_like(result.rstd)).copy_(result.rstd))  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("run", "reason"),
    [(_lower_amax, "amax"), (_halve_amax, "amax"), (_scale_rstd, "rstd"), (_return_one_buffer(), "earlier result")],
)
def test_what_backward_and_later_steps_need_is_judged(run, reason: str) -> None:
    """y is right in all of them."""
    _, call, _ = prepare("fused_linear", "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|keep|transpose|amax")
    verdict = judge_backend("fused_linear", SimpleNamespace(supports=layer.supports, run=run), call, CPU)
    assert not verdict
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ([65504.0, -math.inf, 1.0], True),
        ([math.inf, -math.inf, 1.0], True),
        ([math.inf, math.inf, 1.0], False),
        ([60000.0, -math.inf, 1.0], False),
        ([math.inf, -math.inf, math.inf], False),
        ([math.nan, -math.inf, 1.0], False),
    ],
)
def test_sixteen_bits_that_overflow_are_no_fault(found: list[float], ok: bool) -> None:
    exact = torch.tensor([70000.0, -1e6, 1.0], dtype=torch.float64)
    assert judge_rounded(torch.tensor(found, dtype=torch.float16), exact, torch.zeros(3)).ok == ok


def test_a_layer_in_fp16_passes_with_rows_that_overflow() -> None:
    static = Spec.parse("e4m3:tensor:static")
    call = FusedCall(512, 1024, 256, static, static, torch.float16, 0, "gelu", True, True)
    verdict = judge_backend(
        "fused_linear", SimpleNamespace(run=layer.run, supports=layer.supports), call, "cpu", moved=False
    )
    assert verdict, verdict.reason


@pytest.mark.parametrize("gain", [0.97, 0.99, 1.01])
@pytest.mark.parametrize("variant", [LAYERS[0], LAYERS[3], "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|relu|nonorm"])
def test_a_layer_that_is_larger_by_a_factor_is_noticed(variant: str, gain: float) -> None:
    """Less than a code by itself, and no more noise than twice the usual; but all elements err to one side."""
    _, call, _ = prepare("fused_linear", variant, shape=(64, 128, 96))

    def run(a, b, call, *, out_scale=None, **given):
        result = layer.run(a, b, call, out_scale=out_scale / gain, **given)
        return replace(result, y=replace(result.y, scale=out_scale))

    verdict = judge_backend("fused_linear", SimpleNamespace(supports=layer.supports, run=run), call, "cpu")
    assert not verdict
    assert "the gain is off by" in verdict.reason


def test_a_layer_that_returns_another_scale_is_noticed() -> None:
    """Later kernels are given the one that was asked for."""
    _, call, _ = prepare("fused_linear", LAYERS[0])
    wrong = Wrong(layer, lambda result: replace(result, y=replace(result.y, scale=result.y.scale * 1.001)))
    wrong.supports = layer.supports
    verdict = judge_backend("fused_linear", wrong, call, "cpu")
    assert "y: its scale is" in verdict.reason


def test_an_amax_that_misses_the_last_row_is_noticed() -> None:
    _, call, _ = prepare("fused_linear", "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|relu|nonorm|amax", shape=(64, 128, 96))  # fmt: skip

    def run(a, b, call, *, amax=None, **given):
        if amax is not None:
            first = QTensor(a.data[:-1].contiguous(), a.scale, a.spec)
            layer.run(first, b, replace(call, m=call.m - 1), amax=amax, **given)
        return layer.run(a, b, replace(call, amax=False), **given)

    verdict = judge_backend("fused_linear", SimpleNamespace(supports=layer.supports, run=run), call, "cpu")
    assert "amax is" in verdict.reason


@pytest.mark.parametrize("fault", ["half", "never", "lowered"])
def test_a_norm_with_a_wrong_amax_is_noticed(fault: str) -> None:
    _, call, _ = prepare("norm_quantize", NORMS[4])

    def run(x, call, *, amax=None, **given):
        seen = torch.zeros(())
        result = norm.run(x, call, amax=seen, **given)
        if amax is not None and fault != "never":
            amax.copy_(seen if fault == "lowered" else torch.maximum(amax, seen / 2))
        return result

    verdict = judge_backend("norm_quantize", SimpleNamespace(supports=norm.supports, run=run), call, "cpu")
    assert "amax is" in verdict.reason


@pytest.mark.parametrize("variant", ["dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|relu|bias|amax", NORM_GRADIENTS[0]])  # fmt: skip
def test_a_gradient_that_lowers_its_amax_is_noticed(variant: str) -> None:
    """Another micro-batch of the same step may have had larger gradients."""
    op, law, name = ("fused_linear", layer, "dgrad") if "dgrad" in variant else ("norm_quantize", norm, "gradient")
    _, call, _ = prepare(op, variant, shape=(64, 128, 96))

    def run(*operands, amax=None, **given):
        seen = None if amax is None else torch.zeros(())
        result = getattr(law, name)(*operands, amax=seen, **given)
        if amax is not None:
            amax.copy_(seen)
        return result

    verdict = judge_backend(op, SimpleNamespace(**{"supports": law.supports, "run": law.run, name: run}), call, "cpu")
    assert "amax is" in verdict.reason
