"""The benchmark's views of attention, interaction, dots and route: they accept the law and our kernels, notice what is wrong, and count what must move."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_interpreted
from loka.kernels import BACKENDS, registry
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.measure import bench
from loka.measure.adapter import ADAPTERS, adapter_for
from loka.measure.gate import judge_backend
from loka.measure.masked import NAMES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
SHAPES = {
    "attention": (3, 2, 40),
    "masked_attention": (3, 2, 40),
    "interaction": (4, 32, 16),
    "route": (70, 48, 21),
    "dots": (5, 9, 24),
    "mixed_dots": (5, 9, 24),
}
EVERY = [
    ("attention", "16x32|bfloat16"),
    ("attention", "16x16|gradient|float16"),
    ("attention", "16x16|plain|even|gradient|float32"),
    ("masked_attention", "16|bfloat16"),
    ("masked_attention", "24|gradient|float16"),
    ("masked_attention", "16|even|gradient|float32"),
    ("interaction", "24/16+16|bfloat16"),
    ("interaction", "7/8+8|project|float16"),
    ("interaction", "24/16+16|gradient|bfloat16"),
    ("interaction", "7/8+8|project|gradient|bfloat16"),
    ("route", "top=3|bfloat16"),
    ("route", "top=1|float32|sorted"),
    ("route", "top=8|always|sorted|float16"),
    ("route", "top=21|always|float32"),
    ("dots", "pairs|bfloat16"),
    ("dots", "pairs|self|float32"),
    ("dots", "pairs|self|gradient|float16"),
    ("dots", "pairs|gradient|bfloat16"),
    ("mixed_dots", "mixtures=6|bfloat16"),
    ("mixed_dots", "mixtures=17|float16"),
    ("mixed_dots", "mixtures=6|gradient|bfloat16"),
    ("mixed_dots", "mixtures=6|gradient|float32"),
    ("mixed_dots", "mixtures=6+4|bfloat16"),
    ("mixed_dots", "mixtures=5+18|gradient|float16"),
]
every_variant = pytest.mark.parametrize(("op", "variant"), EVERY)


def prepare(op: str, variant: str, distribution: str = "normal") -> tuple[Any, Any, Any]:
    adapter = adapter_for(op)
    (call,) = adapter.calls([SHAPES[op]], [variant])
    return adapter, call, adapter.operands(call, seed=3, distribution=distribution, device=CPU)


def test_every_op_of_the_registry_has_an_adapter() -> None:
    assert set(ADAPTERS) == set(BACKENDS)


@pytest.mark.parametrize("op", BACKENDS)
def test_every_backend_can_be_asked_about_the_calls_of_its_adapter(op: str) -> None:
    adapter = adapter_for(op)
    for call in adapter.calls([(64, 64, 64)], adapter.VARIANTS):  # type: ignore[attr-defined]
        for name in BACKENDS[op]:
            for kind in ("cpu", "cuda"):
                verdict = registry.backend(op, name).supports(call, torch.device(kind))
                assert verdict or verdict.reason


@every_variant
@pytest.mark.parametrize("distribution", ["normal", "lognormal_rows", "outlier_channels", "zero_rows"])
def test_the_law_conforms(op: str, variant: str, distribution: str) -> None:
    adapter, call, operands = prepare(op, variant, distribution)
    verdict = adapter.check(registry.backend(op, "reference"), call, operands)
    assert verdict, verdict.reason
    assert registry.backend(op, "reference").supports(call, CPU)


@every_variant
def test_the_baseline_conforms_and_a_wrong_one_does_not(op: str, variant: str, monkeypatch: Any) -> None:
    adapter, call, operands = prepare(op, variant)
    verdict = adapter.check_baseline(call, operands)
    assert verdict, verdict.reason
    right = adapter.baseline(call, operands)

    def wrong() -> Any:
        found = right()
        return (
            tuple(t * 1.1 if t.is_floating_point() else t for t in found) if isinstance(found, tuple) else found * 1.1
        )

    monkeypatch.setattr(adapter, "baseline", lambda call, operands: wrong)
    assert not adapter.check_baseline(call, operands)


@every_variant
def test_calls_survive_the_trip_to_a_child(op: str, variant: str) -> None:
    adapter, call, _ = prepare(op, variant)
    assert adapter.decode(adapter.encode(call)) == call


class Wrong:
    """The law with its results changed: `change` gets the name of the function and what it returned."""

    def __init__(self, op: str, change: Callable[[str, Any], Any]) -> None:
        self.law, self.change = registry.backend(op, "reference"), change

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self.law, name)
        return lambda *operands, **options: self.change(name, real(*operands, **options))


def beyond(out: Tensor) -> Tensor:
    """Nothing is written beyond the first rows."""
    return torch.cat([out[:-1], torch.zeros_like(out[-1:])])


def one_slice(out: Tensor) -> Tensor:
    return torch.cat([out[:1] * 1.5, out[1:]])


@pytest.mark.parametrize("change", [beyond, one_slice, lambda out: out * 1.05], ids=["beyond", "slice", "all"])
@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (op, v)
        for op, v in EVERY
        if op in ("attention", "masked_attention", "dots") or (op == "mixed_dots" and "gradient" not in v)
    ],
)
def test_a_wrong_result_is_red(op: str, variant: str, change: Callable[[Tensor], Tensor]) -> None:
    adapter, call, operands = prepare(op, variant)

    def spoil(name: str, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    assert not adapter.check(Wrong(op, spoil), call, operands)


class Rounding(torch.autograd.Function):
    """Attention as a fused kernel rounds it: weights, their gradients, and the result from which delta is computed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        w = (q.float() @ k.float().mT * scale).masked_fill(~mask[:, None, None, :], -torch.inf).softmax(-1)
        out = torch.where(mask[:, None, :, None], (w.to(q.dtype).float() @ v.float()), 0.0).to(q.dtype)
        ctx.save_for_backward(q, k, v, w, out, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, w, out, mask = ctx.saved_tensors
        g = torch.where(mask[:, None, :, None], grads[0], 0.0).float()
        delta = (g * out.float()).sum(-1, keepdim=True)
        ds = (w * (g @ v.float().mT - delta)).to(q.dtype).float()
        dv = w.to(q.dtype).float().mT @ g
        found = (ds @ k.float() * ctx.scale, ds.mT @ q.float() * ctx.scale, dv)
        return *(t.to(q.dtype) for t in found), None, None


class Rounded:
    """A backend of masked attention in 16 bits, with a fault in one of its gradients on request."""

    def __init__(self, fault: Callable[[str, Tensor], Tensor] | None = None) -> None:
        self.fault = fault

    def supports(self, call: Any, device: torch.device) -> Any:
        return registry.backend("masked_attention", "reference").supports(call, device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor, *, scale: float) -> Tensor:
        if self.fault is not None:
            for name, leaf in zip("qkv", (q, k, v), strict=True):
                leaf.register_hook(lambda grad, name=name: self.fault(name, grad))  # type: ignore[misc]
        return Rounding.apply(q, k, v, mask, scale)


@pytest.mark.parametrize("variant", ["32|gradient|bfloat16", "64|even|gradient|bfloat16", "16|gradient|float16"])
def test_gradients_that_nearly_cancel_are_no_fault(variant: str) -> None:
    """With outliers a query attends to one key alone: its gradient is a small difference, off by 2 % for the rounding of `out`."""
    (call,) = adapter_for("masked_attention").calls([(5, 2, 90)], [variant])
    verdict = judge_backend("masked_attention", Rounded(), call, CPU)
    assert verdict, verdict.reason
    assert verdict.error < 0.5  # of what a single check allows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [beyond, one_slice, lambda out: out * 1.05], ids=["beyond", "slice", "all"])
def test_wrong_gradients_of_attention_are_red(name: str, change: Callable[[Tensor], Tensor]) -> None:
    (call,) = adapter_for("masked_attention").calls([(5, 2, 90)], ["32|gradient|bfloat16"])
    wrong = Rounded(lambda leaf, grad: change(grad) if leaf == name else grad)
    verdict = judge_backend("masked_attention", wrong, call, CPU)
    assert f"d{name}" in verdict.reason


def test_attention_of_a_model_is_judged_with_its_own_queries_and_heads() -> None:
    adapter = adapter_for("masked_attention")
    call = adapter.adopt(MaskedAttentionCall(rows=3, queries=2, keys=40, heads=6, shared=3, d=16))
    operands = adapter.operands(call, seed=3, distribution="normal", device=CPU)
    assert operands.q.shape == operands.dy.shape == (3, 6, 2, 16)
    assert operands.k.shape == operands.v.shape == (3, 3, 40, 16)
    assert operands.wanted is None
    for gradient in (False, True):
        law = registry.backend("masked_attention", "reference")
        verdict = adapter.check(law, replace(call, gradient=gradient), operands)
        assert verdict, verdict.reason


@pytest.mark.parametrize("change", [beyond, one_slice, lambda out: out * 1.05], ids=["beyond", "slice", "all"])
@pytest.mark.parametrize(
    ("variant", "part"),
    [("mixtures=6|gradient|bfloat16", 0), ("mixtures=6|gradient|bfloat16", 1), ("mixtures=6+4|gradient|bfloat16", 2), ("mixtures=6+4|bfloat16", 1)],
    ids=["dx", "dw", "dv", "mixtures"],
)  # fmt: skip
def test_wrong_parts_of_mixtures_are_red(variant: str, part: int, change: Callable[[Tensor], Tensor]) -> None:
    def changed(name: str, out: Any) -> Any:
        return tuple(change(value) if i == part else value for i, value in enumerate(out))

    adapter, call, operands = prepare("mixed_dots", variant)
    assert not adapter.check(Wrong("mixed_dots", changed), call, operands)


def test_an_attention_whose_bias_gradient_is_lost_is_red() -> None:
    adapter, call, operands = prepare("attention", "16x16|gradient|float32")

    class Lost:
        def run(self, **operands: Any) -> Tensor:
            return registry.backend("attention", "reference").run(**operands) + 0 * operands["time_bias"].sum()

    class Detached:
        def run(self, **operands: Any) -> Tensor:
            fixed = {**operands, "time_bias": operands["time_bias"].detach()}
            return registry.backend("attention", "reference").run(**fixed) + 0 * operands["time_bias"].sum()

    assert adapter.check(Lost(), call, operands)
    assert "dtime_bias" in adapter.check(Detached(), call, operands).reason


@pytest.mark.parametrize("variant", [v for op, v in EVERY if op == "interaction" and "gradient" not in v])
@pytest.mark.parametrize("part", ["products", "next"])
@pytest.mark.parametrize("change", [beyond, one_slice, lambda out: out * 1.1], ids=["beyond", "slice", "all"])
def test_a_wrong_interaction_is_red(variant: str, part: str, change: Callable[[Tensor], Tensor]) -> None:
    adapter, call, operands = prepare("interaction", variant)

    def spoil(name: str, out: Any) -> Any:
        if name == "run" and part == "products":
            data = change(out.products.data.float()).to(out.products.data.dtype)
            return replace(out, products=replace(out.products, data=data))
        return change(out) if name == "finish" and part == "next" else out

    assert not adapter.check(Wrong("interaction", spoil), call, operands)


@pytest.mark.parametrize("part", ["norm_gradient", "dx", "dw"])
@pytest.mark.parametrize("change", [beyond, one_slice, lambda out: out * 1.1], ids=["beyond", "slice", "all"])
def test_a_wrong_gradient_of_the_interaction_is_red(part: str, change: Callable[[Tensor], Tensor]) -> None:
    adapter, call, operands = prepare("interaction", "24/16+16|gradient|bfloat16")

    def spoil(name: str, out: Any) -> Any:
        if name == "gradient":
            return (change(out[0]) if part == "dx" else out[0], change(out[1]) if part == "dw" else out[1])
        return change(out) if name == part else out

    assert not adapter.check(Wrong("interaction", spoil), call, operands)


def other_expert(ids: Tensor) -> Tensor:
    return torch.cat([(ids[:1] + 1) % 21, ids[1:]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids, gates: (other_expert(ids), gates), "better expert was left out|weight|twice"),
        (lambda ids, gates: (ids.flip(1), gates.flip(1)), "better expert was left out, or visited later"),
        (lambda ids, gates: (ids, gates * 1.01), "a weight is not that of its expert"),
        (lambda ids, gates: (ids, beyond(gates)), "a weight is not that of its expert"),
        (lambda ids, gates: (ids[:, :2], gates[:, :2]), "expected"),
        (lambda ids, gates: (ids[:, :1].expand(-1, 3), gates), "one twice"),
    ],
)
def test_a_wrong_route_is_red(change: Callable[[Tensor, Tensor], Any], reason: str) -> None:
    import re

    adapter, call, operands = prepare("route", "top=3|bfloat16")
    verdict = adapter.check(Wrong("route", lambda name, out: change(*out)), call, operands)
    assert not verdict
    assert re.search(reason, verdict.reason)


def test_a_route_that_breaks_ties_the_other_way_is_red() -> None:
    adapter, call, operands = prepare("route", "top=3|float32")

    class LastFirst:
        def run(self, x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool) -> Any:
            law = registry.backend("route", "reference")
            ids, gates = law.run(x, weight.flip(0), balance.flip(0), top, always=always)
            return weight.shape[0] - 1 - ids, gates

    assert "equal scores in another order" in adapter.check(LastFirst(), call, operands).reason


@pytest.mark.parametrize("part", [0, 1, 2, 3], ids=["order", "offsets", "inverse", "weights"])
def test_a_wrong_sorted_route_is_red(part: int) -> None:
    adapter, call, operands = prepare("route", "top=8|always|sorted|float16")

    def spoil(name: str, out: Any) -> Any:
        changed = list(out)
        changed[part] = out[part] * 1.01 if part == 3 else out[part].roll(1)
        return tuple(changed)

    assert not adapter.check(Wrong("route", spoil), call, operands)


def test_what_must_move() -> None:
    adapter, call, operands = prepare("attention", "16x32|bfloat16")
    assert operands.lengths == (40, 27, 14)
    assert adapter.bytes_moved(call) == 81 * 2 * 2 * (16 + 16 + 32 + 32)
    adapter, call, operands = prepare("masked_attention", "24|gradient|float16")
    assert operands.mask.sum(1).tolist() == [40, 27, 14]
    assert adapter.bytes_moved(call) == (7 * 81 + 4 * 120) * 2 * 24 * 2
    assert adapter.flops(call) == 7 * 2 * 24 * 2 * (40**2 + 27**2 + 14**2)
    adapter, call, _ = prepare("interaction", "24/16+16|bfloat16")
    assert adapter.bytes_moved(call) == 4 * (32 * 16 * 2 + 32 * 24 + 16 * 16 * 2 + 32 * 16 * 2)
    assert adapter.flops(call) == 2 * 4 * (40 * 32 * 16 + 32 * 24 * 16)
    adapter, call, _ = prepare("route", "top=3|bfloat16")
    assert (adapter.bytes_moved(call), adapter.flops(call)) == ((70 + 21) * 48 * 2 + 70 * 3 * 12, 2 * 70 * 48 * 21)


@pytest.mark.parametrize(
    ("op", "variant"), [("attention", "16"), ("interaction", "24/16"), ("route", "3"), ("route", "top=3|masked")]
)
def test_variants_that_mean_nothing_are_refused(op: str, variant: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        adapter_for(op).calls([SHAPES[op]], [variant])


@pytest.mark.parametrize("op", SHAPES)
def test_the_benchmark_runs(op: str) -> None:
    variants = [variant for name, variant in EVERY if name == op][:1]
    config = bench.BenchConfig(
        op=op, shapes=[SHAPES[op]], variants=variants, backends=("reference",), device="cpu", repeats=3, isolate=False
    )
    (baseline, row) = bench.run(config).rows
    assert (baseline.backend, row.backend) == ("bf16", "reference")
    assert row.refusal is None
    assert row.microseconds is not None


@pytest.mark.parametrize(
    ("op", "variant", "distribution"),
    [
        ("attention", "16x16|gradient|float16", "lognormal_rows"),
        ("attention", "16x32|plain|float32", "outlier_channels"),
        ("masked_attention", "24|gradient|float16", "lognormal_rows"),
        ("interaction", "24/16+16|float16", "normal"),
        ("interaction", "7/8+8|project|gradient|float16", "outlier_channels"),
        ("dots", "pairs|self|gradient|float16", "outlier_channels"),
        ("mixed_dots", "mixtures=17|float16", "outlier_channels"),
        ("mixed_dots", "mixtures=6|gradient|float16", "normal"),
        ("route", "top=3|float32", "zero_rows"),
        ("route", "top=8|always|sorted|float16", "lognormal_rows"),
    ],
)
def test_our_kernels_conform_triton(op: str, variant: str, distribution: str) -> None:
    adapter, call, operands = prepare(op, variant, distribution)
    backend = registry.backend(op, "triton")
    said = backend.supports(call, CPU)
    if not said:
        pytest.skip(said.reason)
    verdict = adapter.check(backend, call, operands)
    assert verdict, verdict.reason


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
