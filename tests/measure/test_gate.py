"""The gate at the true shape: what it refuses, what it lets pass, and that it asks once. Generated kernels are in tests/benchmarks/test_defects.py."""

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.formats import QTensor, Spec, decode, encode
from loka.formats import quantize as quantize_by_law
from loka.kernels import registry
from loka.kernels.backend import YES, no
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm import reference
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import gate, judge_backend, judge_quantizer
from loka.measure.adapter import adapter_for, parse_variant
from loka.measure.gate import forget_answers, judge_products

from .hopper import Hopper

ROW = Spec.parse("e4m3:row")
SPECS = (
    "e4m3:tensor@e4m3:tensor|fast", "e4m3:row@e4m3:row", "e4m3:1x128@e4m3:128x128", "e5m2:row@e4m3:row|fast|float32", "e4m3:row@e4m3:row|float16",
    "int8:row@int8:row|float32", "e4m3:1x32:e8m0@e4m3:1x32:e8m0", "e2m1:1x16:e4m3@e2m1:1x16:e4m3",
)  # fmt: skip


def backend(run: Any, **more: Any) -> Any:
    return SimpleNamespace(supports=lambda call, device: YES, run=run, **more)


def right(a: QTensor, b: QTensor, **options: Any) -> Tensor:
    return reference.run(a, b, **options)


def call(m: int = 96, k: int = 80, n: int = 72, variant: str = "e4m3:row@e4m3:row") -> MatmulCall:
    return parse_variant(variant, (m, k, n))


def judge(run: Any, described: MatmulCall | None = None, **more: Any) -> Any:
    return judge_backend("scaled_mm", backend(run, **more), described or call(), "cpu")


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 13, 27), (7, 479, 5), (130, 64, 66), (2, 2, 3)])
@pytest.mark.parametrize("variant", SPECS)
def test_a_right_kernel_passes_at_any_shape_and_spec(variant: str, shape: tuple[int, int, int]) -> None:
    verdict = judge(right, call(*shape, variant=variant))
    assert verdict, verdict.reason


@pytest.mark.parametrize("shape", [(0, 16, 8), (8, 16, 0)])
def test_an_empty_result_passes(shape: tuple[int, int, int]) -> None:
    verdict = judge(right, call(*shape))
    assert verdict, verdict.reason


@pytest.mark.parametrize("fast", ["", "|fast"])
@pytest.mark.parametrize(
    "variant", ["e4m3:row@e4m3:row", "e4m3:tensor@e4m3:tensor|float32", "e4m3:1x128@e4m3:128x128|float32"]
)
def test_hopper_arithmetic_passes(variant: str, fast: str) -> None:
    verdict = judge(Hopper().run, call(24, 640, 20, variant + fast))
    assert verdict, verdict.reason
    assert verdict.error > 0.02 * verdict.tolerance  # there was something to forgive


def test_the_reference_is_judged_too_and_quickly() -> None:
    for shape in ((96, 80, 72), (1 << 22, 1 << 22, 8)):  # a true shape that would not fit into memory
        assert judge_backend("scaled_mm", registry.backend("scaled_mm", "reference"), call(*shape), "cpu")


def test_a_reference_that_somebody_replaced_is_a_kernel_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference, "run", lambda a, b, **options: torch.zeros(a.shape[0], b.shape[0], dtype=options["out_dtype"])
    )
    assert not judge_backend("scaled_mm", registry.backend("scaled_mm", "reference"), call(), "cpu")


def spoil(part: tuple[Any, ...], factor: float = 0.0) -> Any:
    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        out = reference.run(a, b, **options)
        out[part] *= factor
        return out

    return run


def test_zeros_beyond_a_row_are_found_at_the_true_shape_only() -> None:
    """The kernel that passed while the gate cut the rows."""
    run = spoil((slice(1024, None),))
    assert judge(run, call(1024, 32, 16))
    verdict = judge(run, call(2048, 32, 16))
    assert not verdict
    assert "row" in verdict.reason


def test_a_small_error_in_one_tile_does_not_drown() -> None:
    verdict = judge(spoil((slice(32, 40), slice(16, 24)), 1.02), call(512, 64, 256))
    assert not verdict
    assert "rows 32 to 39, columns 16 to 23" in verdict.reason


def _drop_dominating(rows: Tensor) -> Tensor:
    largest, second = rows.abs().topk(2, dim=1).values.T
    dropped = rows.scatter(1, rows.abs().argmax(1, keepdim=True), 0.0)
    return torch.where(((largest > 0) & (largest >= 64 * second))[:, None], dropped, rows)


def _clip_outliers(rows: Tensor) -> Tensor:
    limit = 16 * rows.abs().mean(1, keepdim=True)
    return rows.clamp(-limit, limit)


@pytest.mark.parametrize("change", [_drop_dominating, _clip_outliers])
@pytest.mark.parametrize("variant", SPECS)
@pytest.mark.parametrize("shape", [(7, 479, 5), (256, 1024, 8), (64, 256, 1)])
def test_a_kernel_that_loses_single_large_weights_is_refused(
    change: Any, variant: str, shape: tuple[int, int, int]
) -> None:
    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        changed = encode(change(decode(b.data, b.spec.format)), b.spec.format)
        return reference.run(a, replace(b, data=changed), **options)

    assert not judge(run, call(*shape, variant=variant))


@pytest.mark.parametrize("where", [slice(None), slice(0, 8), slice(-8, None)], ids=["anywhere", "first", "last"])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row", "e4m3:tensor@e4m3:tensor", "e5m2:row@e4m3:row|fast|float32"])
def test_a_kernel_that_loses_a_nan_is_refused(variant: str, operand: str, where: slice) -> None:
    def lose(q: QTensor) -> QTensor:
        values = decode(q.data, q.spec.format)
        values[:, where] = values[:, where].nan_to_num(0.0)
        return replace(q, data=encode(values, q.spec.format))

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        return reference.run(lose(a) if operand == "a" else a, lose(b) if operand == "b" else b, **options)

    verdict = judge(run, call(variant=variant))
    assert not verdict
    assert "on extreme operands" in verdict.reason
    assert "differ in being NaN" in verdict.reason


def write_after(x: Tensor) -> None:
    """Change the byte behind a tensor, or else the one before it, if its storage has one."""
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    size = x.element_size()
    end = size * (x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1)
    at = end if end < len(memory) else size * x.storage_offset() - 1
    if at >= 0:
        memory[at] += 1


@pytest.mark.parametrize("part", ["a.data", "a.scale", "b.data", "b.scale"])
@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row", "e4m3:1x128@e4m3:128x128"])
def test_a_kernel_that_writes_beside_its_operands_is_refused(variant: str, part: str) -> None:
    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        operand, name = part.split(".")
        write_after(getattr(a if operand == "a" else b, name))
        return reference.run(a, b, **options)

    verdict = judge(run, call(variant=variant))
    assert not verdict
    assert "it writes beside its operands" in verdict.reason


def test_a_kernel_that_is_wrong_in_another_thread_is_refused() -> None:
    """A backward pass on a GPU has its own thread: state per thread, such as a workspace, must be right there too."""
    home = threading.get_ident()

    def spoiled(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        return reference.run(a, b, **options) * (1 if threading.get_ident() == home else 1.1)

    verdict = judge(spoiled)
    assert not verdict
    assert "called from another thread" in verdict.reason

    def quantize(x: Tensor, spec: Spec) -> QTensor:
        return quantize_by_law(x if threading.get_ident() == home else 2 * x, spec)

    verdict = judge_quantizer(quantize, QuantizeCall(24, 40, ROW), "cpu")
    assert not verdict
    assert "called from another thread" in verdict.reason


TRIGGERS = {
    "nothing negative": lambda v: (v >= 0).all().expand(len(v)),
    "half zeros": lambda v: ((v == 0).float().mean(1) - 0.5).abs() < 0.15,
    "rows without a negative element or a zero": lambda v: (v > 0).all(1),
    "rows of one value": lambda v: (v == v[:, :1]).all(1) & (v[:, 0] != 0),
    "equal columns": lambda v: (v[:, 0] == v[:, 1]).all().expand(len(v)),
}


@pytest.mark.parametrize("trigger", TRIGGERS.values(), ids=TRIGGERS)
@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row", "e5m2:tensor@e4m3:tensor"])
def test_a_kernel_that_is_wrong_behind_a_relu_is_refused(trigger: Any, variant: str) -> None:
    """Inputs behind a ReLU are the most frequent ones of a linear: a shortcut for them must be right."""

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        factor = torch.where(trigger(decode(a.data, a.spec.format)), 1.1, 1.0)
        return (reference.run(a, b, **options).double() * factor[:, None]).to(options["out_dtype"])

    def gradient(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        """In a weight gradient, what comes from a ReLU is the other operand: look at its rows one by one."""
        factor = torch.stack([trigger(row[None])[0] for row in decode(b.data, b.spec.format)])
        right = reference.run(a, b, **options).double()
        return (right * torch.where(factor, 1.1, 1.0)).to(options["out_dtype"])

    assert not judge(run, call(variant=variant))
    assert not judge(gradient, call(variant=variant))


def test_a_kernel_that_reads_one_scale_at_the_beginning_of_its_storage_is_refused() -> None:
    """Remembered scales are elements of a longer tensor."""

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        storage = a.scale.untyped_storage()
        first = torch.empty(0, dtype=a.scale.dtype).set_(storage, 0, a.scale.shape)
        return reference.run(replace(a, scale=first), b, **options)

    assert not judge(run, call(variant="e4m3:tensor@e4m3:tensor"))


def test_what_the_reason_names() -> None:
    state: list[Tensor] = []

    def one_buffer(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        state[:] = state or [reference.run(a, b, **options)]
        return state[0].copy_(reference.run(a, b, **options))

    def greedy(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        out = reference.run(a, b, **options)
        b.data.view(torch.uint8)[0] = 0
        return out

    def crash(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        raise RuntimeError("no kernel image")

    assert "memory that an earlier result was returned in" in judge(one_buffer).reason
    assert "writes into its operands" in judge(greedy).reason
    assert judge(crash).reason == "RuntimeError: no kernel image"
    assert judge(crash).raised
    verdict = judge_backend(
        "scaled_mm", SimpleNamespace(supports=lambda c, d: no("not on a Tuesday"), run=right), call(), "cpu"
    )
    assert (verdict.ok, verdict.reason) == (False, "not on a Tuesday")
    assert "torch.float32, expected" in judge(lambda a, b, **options: right(a, b, out_dtype=torch.float32)).reason


def test_odd_addresses_may_be_declined_but_not_spoiled() -> None:
    def odd(a: QTensor) -> bool:
        return a.data.data_ptr() % 16 != 0 or not a.data.is_contiguous()

    def declines(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        if odd(a) or odd(b):
            raise ValueError("16 bytes, please")
        return right(a, b, **options)

    assert judge(declines)
    verdict = judge(lambda a, b, **options: right(a, b, **options) * (1.1 if odd(a) else 1))
    assert not verdict
    assert "odd" in verdict.reason


def test_a_prepared_weight_must_be_right_too() -> None:
    def prepare(weight: QTensor, a: Spec) -> QTensor:
        return QTensor(weight.data, weight.scale * 1.1, weight.spec)

    assert not judge(right, prepare=prepare)
    assert judge(right, prepare=lambda weight, a: QTensor(weight.data.clone(), weight.scale.clone(), weight.spec))


def test_unwritten_memory_is_found_even_where_it_holds_the_right_values() -> None:
    def lucky(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        out = right(a, b, **options)
        return (
            out
            if not torch.empty(4).isnan().all()
            else torch.where(torch.arange(len(out))[:, None] < 90, out, torch.nan)
        )

    verdict = judge(lucky)
    assert not verdict
    assert "poisoned memory" in verdict.reason


def test_a_kernel_that_adds_in_another_order_each_time_passes() -> None:
    generator = torch.Generator().manual_seed(0)

    def shuffled(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        order = torch.randperm(a.shape[1], generator=generator)
        return (a.dequantize()[:, order] @ b.dequantize()[:, order].T).to(options["out_dtype"])

    assert judge(shuffled, call(variant="e4m3:row@e4m3:row|float32"))


def test_judging_leaves_no_operands_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many calls are judged one after the other, the GPU would hold the operands of all until Python looks for cycles."""
    made: list[weakref.ref[Tensor]] = []
    draw = gate.matmul_set

    def draw_noted(*given: Any, **options: Any) -> Any:
        drawn = draw(*given, **options)
        made.append(weakref.ref(drawn.a.data))
        return drawn

    monkeypatch.setattr(gate, "matmul_set", draw_noted)
    gc.collect()
    gc.disable()
    try:
        assert judge(right)
        assert made
        assert not any(left() is not None for left in made)
    finally:
        gc.enable()


def test_backends_are_judged_side_by_side_as_alone() -> None:
    def raising(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        raise RuntimeError("no kernel for this")

    def writing(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        y = right(a, b, **options)
        a.scale.mul_(2)
        return y

    def twice(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        return 2 * right(a, b, **options)

    for order in ((right, raising, writing, twice), (twice, writing, raising, right)):
        backends = [backend(run) for run in order]
        together = judge_products(backends, call(), "cpu")
        cached = [judge_backend("scaled_mm", one, call(), "cpu") for one in backends]
        assert all(a is b for a, b in zip(together, cached, strict=True))
        forget_answers()
        alone = [judge_backend("scaled_mm", one, call(), "cpu") for one in backends]
        assert together == alone
        assert [run for run, verdict in zip(order, together, strict=True) if verdict] == [right]


def test_no_backend_gets_the_memory_of_anothers_right_result() -> None:
    before: list[weakref.ref[Tensor]] = []
    kept = []

    def first(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        y = right(a, b, **options)
        before.append(weakref.ref(y))
        return y

    def second(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        kept.append(before[-1]() is not None)
        return right(a, b, **options)

    assert all(judge_products([backend(first), backend(second)], call(), "cpu"))
    assert len(kept) == 39
    assert all(kept)


def test_a_kernel_that_writes_into_an_earlier_result_is_refused() -> None:
    returned: list[Tensor] = []

    def late(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        if returned:
            returned[-1].zero_()
        returned.append(right(a, b, **options))
        return returned[-1]

    verdict = judge(late)
    assert not verdict
    assert "it writes into a result that it has returned earlier" in verdict.reason


def test_backends_that_have_too_little_memory_together_are_judged_one_by_one() -> None:
    rivals: list[Tensor] = []

    def greedy(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        if rivals:
            raise torch.OutOfMemoryError("no room for both")
        return right(a, b, **options)

    def large(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        rivals.append(y := right(a, b, **options))
        return y

    backends = [backend(greedy), backend(large)]
    verdicts = judge_products(backends, call(), "cpu")
    assert verdicts[0].raised
    assert "no room for both" in verdicts[0].reason
    assert verdicts[1]
    rivals.clear()
    assert judge_backend("scaled_mm", backends[0], call(), "cpu")  # it was not remembered


def test_a_backend_that_is_named_twice_is_judged_once() -> None:
    calls = 0

    def counted(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return right(a, b, **options)

    one = backend(counted)
    assert all(judge_products([one, backend(right), one], call(), "cpu"))
    assert calls == 39


def test_large_results_of_several_backends_are_not_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def named(name: str) -> Any:
        def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
            asked.append(name)
            return right(a, b, **options)

        return backend(run)

    monkeypatch.setattr(gate, "SHARED", call().m * call().n - 1)
    assert all(judge_products([named("a"), named("b")], call(), "cpu"))
    assert asked == sorted(asked)


def test_every_judged_kernel_is_called_from_a_thread_that_is_new() -> None:
    known = threading.local()
    known.here = True

    def wrong_at_first(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        new = not hasattr(known, "here")
        known.here = True
        return right(a, b, **options) * (2 if new else 1)

    kernel = backend(wrong_at_first)
    for m in (96, 97):
        verdict = judge_backend("scaled_mm", kernel, call(m=m), "cpu")
        assert not verdict
        assert "called from another thread" in verdict.reason
    assert not any(judge_products([kernel, backend(wrong_at_first)], call(m=98), "cpu"))
    assert not [one for one in threading.enumerate() if one.name.startswith("judge-elsewhere")]


def test_a_kernel_may_itself_have_a_kernel_judged() -> None:
    def careful(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        assert judge_backend("scaled_mm", backend(right), call(m=8, k=16, n=8), "cpu")
        return right(a, b, **options)

    assert judge(careful, call(m=9, k=16, n=8))


@pytest.mark.parametrize("together", [False, True])
def test_no_operand_outlives_a_kernel_that_raises(together: bool) -> None:
    made = []

    def raising(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        made.extend((weakref.ref(a.data), weakref.ref(b.data)))
        if len(made) > 20:
            raise RuntimeError("no kernel for this")
        made.append(weakref.ref(y := right(a, b, **options)))
        return y

    gc.collect()
    gc.disable()
    try:
        backends = [backend(raising), *([backend(right)] if together else [])]
        assert judge_products(backends, call(), "cpu")[0].raised
        assert len(made) > 20
        assert not any(left() is not None for left in made)
    finally:
        gc.enable()


def test_the_same_question_is_asked_once() -> None:
    calls = 0

    def counted(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return right(a, b, **options)

    kernel = backend(counted)
    for _ in range(2):
        assert judge_backend("scaled_mm", kernel, call(), "cpu")
    assert calls >= 24  # what finds a fault of probability 0.2 with probability 0.995
    first = calls
    judge_backend("scaled_mm", kernel, call(m=97), "cpu")
    assert calls > first
    first = calls
    forget_answers()
    judge_backend("scaled_mm", kernel, call(), "cpu")
    assert calls > first


@pytest.mark.parametrize(
    "spec", ["e4m3:row", "e4m3:tensor", "e4m3:1x128", "e4m3:128x128", "e5m2:row", "e2m1:1x16:e4m3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_quantiser_passes(spec: str, dtype: torch.dtype) -> None:
    verdict = judge_quantizer(
        lambda x, spec: quantize_by_law(x, spec), QuantizeCall(37, 200, Spec.parse(spec), dtype), "cpu"
    )
    assert verdict, verdict.reason


@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:tensor", "e4m3:128x128", "e5m2:1x128"])
def test_quantisers_that_fail_on_zeros_or_infinities_are_refused(spec: str) -> None:
    def divide_by_zero(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        return q if x.any() else replace(q, scale=q.scale * torch.nan)

    def count_infinities(x: Tensor, spec: Spec) -> QTensor:
        return quantize_by_law(x.nan_to_num(nan=torch.nan), spec)

    def overflow(x: Tensor, spec: Spec) -> QTensor:
        return quantize_by_law(torch.where(x.isfinite(), x.clamp(-1e20, 1e20), x), spec)

    def write(x: Tensor, spec: Spec) -> QTensor:
        write_after(x)
        return quantize_by_law(x, spec)

    described = QuantizeCall(150, 200, Spec.parse(spec))
    for quantizer, said in (
        (divide_by_zero, "on zero operands"), (count_infinities, "on extreme"), (overflow, "on extreme"), (write, "beside its input"),
    ):  # fmt: skip
        verdict = judge_quantizer(quantizer, described, "cpu")
        assert not verdict, quantizer
        assert said in verdict.reason


def test_quantisers_that_are_a_bit_off_are_refused() -> None:
    def off_at_saturation(x: Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        codes = q.data.view(torch.uint8).clone()
        codes[codes == 0x7E] = 0x7D
        return QTensor(codes.view(q.data.dtype), q.scale, spec)

    verdict = judge_quantizer(off_at_saturation, QuantizeCall(64, 64, ROW, torch.float32), "cpu")
    assert not verdict
    assert "elements differ" in verdict.reason


@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:tensor:static"])
def test_a_backend_of_quantize_is_judged_with_its_transpose(spec: str) -> None:
    described = QuantizeCall(40, 72, Spec.parse(spec), torch.bfloat16, Spec.parse("e4m3:row"))
    kernel = registry.backend("quantize", "reference")
    assert judge_backend("quantize", backend(lambda x, spec, **o: kernel.run(x, spec, **o)), described, "cpu")

    def wrong_transpose(x: Tensor, spec: Spec, **options: Any) -> Any:
        q, q_t = kernel.run(x, spec, **options)
        return q, QTensor(q_t.data, q_t.scale * 2, q_t.spec)

    assert not judge_backend("quantize", backend(wrong_transpose), described, "cpu")


@pytest.mark.parametrize("op", ["fused_linear", "grouped_mm", "topk"])
def test_other_ops_are_judged_through_their_adapter(op: str) -> None:
    adapter = adapter_for(op)
    described = adapter.calls([(16, 64, 32)], [adapter.VARIANTS[-1] if op == "fused_linear" else adapter.VARIANTS[0]])[
        0
    ]
    kernel = registry.backend(op, "reference")
    verdict = judge_backend(op, kernel, described, "cpu")
    assert verdict, verdict.reason
    with pytest.raises(ValueError, match="no benchmark for op"):
        adapter_for("nothing")


@pytest.mark.parametrize("op", ["fused_linear", "grouped_mm"])
def test_a_kernel_of_another_op_that_remembers_a_weight_by_its_address_is_refused(op: str) -> None:
    adapter = adapter_for(op)
    described = adapter.calls([(16, 64, 32)], [adapter.VARIANTS[0]])[0]
    kernel, known = registry.backend(op, "reference"), {}

    def remembering(a: Any, b: QTensor, *operands: Any, **options: Any) -> Any:
        kept = known.setdefault(b.data.data_ptr(), replace(b, data=b.data.clone(), scale=b.scale.clone()))
        return kernel.run(a, kept, *operands, **options)

    verdict = judge_backend(op, SimpleNamespace(supports=kernel.supports, run=remembering), described, "cpu")
    assert not verdict


def test_an_op_known_by_its_adapter_is_called_often_enough_for_a_race() -> None:
    adapter = adapter_for("topk")
    described = adapter.calls([(8, 64, 4)], ["float32"])[0]
    kernel, calls = registry.backend("topk", "reference"), 0

    def racing(*operands: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        values, index = kernel.run(*operands, **options)
        return (values, index) if calls < 24 else (values + 1, index)

    verdict = judge_backend("topk", SimpleNamespace(supports=kernel.supports, run=racing), described, "cpu")
    assert not verdict


@pytest.mark.parametrize("spec", ["e4m3:row:stochastic", "e2m1:1x16:e4m3:stochastic", "int8:row:stochastic"])
def test_a_stochastic_quantiser_is_judged_by_neighbours_and_chances(spec: str) -> None:
    call = QuantizeCall(96, 64, Spec.parse(spec), torch.float32)
    assert judge_quantizer(lambda x, spec: quantize_by_law(x, spec), call, "cpu")

    def nearest(x: torch.Tensor, spec: Spec) -> QTensor:
        half = torch.full_like(x, 0.5)
        return quantize_by_law(x, spec, noise=half)

    def upwards(x: torch.Tensor, spec: Spec) -> QTensor:
        return quantize_by_law(x, spec, noise=torch.rand_like(x) * 0.8)

    def elsewhere(x: torch.Tensor, spec: Spec) -> QTensor:
        q = quantize_by_law(x, spec)
        return QTensor(q.data.roll(1, 1), q.scale, q.spec, q.tensor_scale)

    for wrong, why in ((nearest, "standard errors"), (upwards, "standard errors"), (elsewhere, "not a neighbor")):
        verdict = judge_quantizer(wrong, call, "cpu")
        assert not verdict
        assert why in verdict.reason


def test_want_of_memory_is_no_verdict_for_ever() -> None:
    short = [True]

    def run(a: QTensor, b: QTensor, **options: Any) -> Tensor:
        if short:
            raise torch.OutOfMemoryError("no room")
        return reference.run(a, b, **options)

    subject = backend(run)
    assert "no room" in judge_backend("scaled_mm", subject, call(), "cpu").reason
    short.clear()
    assert judge_backend("scaled_mm", subject, call(), "cpu").ok
