"""The benchmark's views of grouped_mm, beam_attention and topk: they accept the law, notice what is wrong, and count what must move."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forked import run_script
from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, SwigluCall
from loka.kernels.route.call import RouterCall
from loka.kernels.topk.call import BeamTopkCall
from loka.measure.adapter import adapter_for
from loka.measure.gate import judge_backend
from loka.measure.grouped import group_offsets
from loka.measure.kernel_calls import KernelCall, judge_call
from loka.records import load
from loka.records.performance import KernelBench

CPU = torch.device("cpu")
SHAPES = {"grouped_mm": (60, 256, 128), "beam_attention": (2, 9, 40), "topk": (3, 600, 20)}
EVERY = [
    ("grouped_mm", "float32|5"),
    ("grouped_mm", "bfloat16|5|even"),
    ("grouped_mm", "e4m3:row@e4m3:row|5|fast"),
    ("grouped_mm", "e4m3:1x128@e4m3:128x128|4"),
    ("beam_attention", "4/2x16|bfloat16"),
    ("beam_attention", "4/2x16|shared|ragged|float32"),
    ("beam_attention", "4/2x16|ragged|fp8|bfloat16"),
    ("beam_attention", "4/2x16|shared|fp8|float32"),
    ("beam_attention", "ancestors 4x16|bfloat16"),
    ("beam_attention", "ancestors 4x16>e4m3:row|keep|float32"),
    ("topk", "float32"),
    ("topk", "bfloat16|unsorted"),
    ("topk", "float32|beams=6"),
    ("topk", "bfloat16|beams=6|masked"),
]


def prepare(op: str, variant: str, distribution: str = "normal"):
    adapter = adapter_for(op)
    (call,) = adapter.calls([SHAPES[op]], [variant])
    return adapter, call, adapter.operands(call, seed=3, distribution=distribution, device=CPU)


@pytest.mark.parametrize(("op", "variant"), EVERY)
@pytest.mark.parametrize("distribution", ["normal", "outlier_channels", "zero_rows"])
def test_the_law_conforms(op: str, variant: str, distribution: str) -> None:
    adapter, call, operands = prepare(op, variant, distribution)
    verdict = adapter.check(registry.backend(op, "reference"), call, operands)
    assert verdict, verdict.reason
    assert adapter.check_baseline(call, operands)


@pytest.mark.parametrize(("op", "variant"), EVERY)
def test_calls_survive_the_trip_to_a_child(op: str, variant: str) -> None:
    adapter, call, _ = prepare(op, variant)
    assert adapter.decode(adapter.encode(call)) == call


class Wrong:
    """The reference with its first result changed in one place."""

    def __init__(self, op: str, change) -> None:
        self.law, self.change = registry.backend(op, "reference"), change

    def run(self, *operands, **options):
        out = self.law.run(*operands, **options)
        return self.change(out) if isinstance(out, torch.Tensor) else (self.change(out[0]), *out[1:])

    def ancestors(self, *operands, **options):
        out = self.law.ancestors(*operands, **options)
        if isinstance(out, torch.Tensor):
            return self.change(out)
        return QTensor(out.data, self.change(out.scale), out.spec)

    def beams(self, *operands, **options):
        values, *rest = self.law.beams(*operands, **options)
        return self.change(values), *rest


def one_off(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[0, 0] += 1
    return out


@pytest.mark.parametrize(("op", "variant"), EVERY)
@pytest.mark.parametrize(
    "change", [one_off, lambda out: out * 1.02, lambda out: out[:, :-1]], ids=["one", "all", "shape"]
)
def test_a_wrong_kernel_is_red(op: str, variant: str, change) -> None:
    adapter, call, operands = prepare(op, variant)
    try:
        verdict = adapter.check(Wrong(op, change), call, operands)
    except (RuntimeError, ValueError):  # an attention that loses a beam cannot even be laid beside the law
        return
    assert not verdict


def test_swapped_indices_are_red() -> None:
    adapter, call, operands = prepare("topk", "float32")

    class Swapped:
        def run(self, *operands, **options):
            values, indices = registry.backend("topk", "reference").run(*operands, **options)
            return values, indices.flip(1)

    assert "first index" in adapter.check(Swapped(), call, operands).reason


def test_loads_are_what_they_say() -> None:
    even = group_offsets(100, 4, even=True, seed=0, device=CPU)
    assert even.tolist() == [0, 25, 50, 75, 100]
    skewed = group_offsets(5300, 53, even=False, seed=0, device=CPU)
    counts = skewed.diff()
    assert skewed[-1] == 5300
    assert counts[1] == 0
    assert counts.max() >= 2 * 100  # of the mean


def test_what_must_move() -> None:
    adapter, call, _ = prepare("grouped_mm", "e4m3:row@e4m3:row|5|fast")
    assert adapter.bytes_moved(call) == 60 * 256 + 5 * 128 * 256 + 2 * 60 * 128
    assert adapter.flops(call) == 2 * 60 * 256 * 128
    adapter, call, _ = prepare("beam_attention", "4/2x16|shared|ragged|float32")
    assert adapter.bytes_moved(call) == 4 * (2 * 2 * 9 * 4 * 16 + 2 * 40 * 2 * 16)
    adapter, call, _ = prepare("beam_attention", "4/2x16|fp8|float16")
    assert adapter.bytes_moved(call) == 2 * 2 * 2 * 9 * 4 * 16 + 2 * 2 * 40 * 2 * 16
    adapter, call, _ = prepare("topk", "bfloat16|beams=6|masked")
    assert adapter.bytes_moved(call) == 3 * 6 * 600 * 3


def test_variants_that_mean_nothing_are_refused() -> None:
    for op, variant in (("grouped_mm", "e4m3:row|5"), ("beam_attention", "11x128"), ("topk", "float32|masked")):
        with pytest.raises(ValueError, match="is not"):
            adapter_for(op).calls([SHAPES[op]], [variant])


def test_the_script_walks_every_section(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "generative_kernels.py"
    out = tmp_path / "record.json"
    code, said = run_script(script, "--smoke", "--seconds", "100", "--out", str(out))
    assert code == 1, said  # emulation meets no bar, and that is said
    assert "MISSED" in said
    record = load(out, KernelBench)
    assert {row.op for row in record.rows} == {"grouped_mm", "topk", "beam_attention"}
    assert all(row.refusal is None and row.microseconds is not None for row in record.rows), said


@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("place", [0, 2], ids=["earlier", "new"])
def test_a_step_that_leaves_another_cache_is_red(field: str, place: int) -> None:
    adapter, call, _ = prepare("beam_attention", "ancestors 4x16|keep|float32")
    call = replace(call, steps=2)
    operands = adapter.operands(call, seed=3, distribution="normal", device=CPU)

    class Careless:
        def ancestors(self, q, k, v, keys, values, table, **options):
            out = registry.backend("beam_attention", "reference").ancestors(q, k, v, keys, values, table, **options)
            (keys if field == "keys" else values)[place, -1, -1] = 0
            return out

    assert adapter.check(registry.backend("beam_attention", "reference"), call, operands)
    assert "cache" in adapter.check(Careless(), call, operands).reason


ROWS = Spec.parse("e4m3:row")
STEPS = [
    GroupedCall(60, 64, 96, 4, ROWS, ROWS, torch.float8_e4m3fn, swiglu=True, out=Spec.parse("e4m3:1x128")),
    GroupedCall(60, 64, 96, 4, in_dtype=torch.float32, out_dtype=torch.float32, swiglu=True),
    SwigluCall(60, 48, ROWS),
    SwigluCall(60, 48, None, torch.float32),
    MoveCall(20, 3, 4),
    MoveCall(20, 3, 4, torch.float8_e4m3fn, "gather", 64, ROWS),
    MoveCall(20, 3, 4, torch.bfloat16, "gather", 64),
    MoveCall(20, 3, 4, torch.bfloat16, "combine", 64),
]


@pytest.mark.parametrize("call", STEPS, ids=str)
def test_what_surrounds_the_products_of_experts_is_judged(call: Any) -> None:
    law = registry.backend("grouped_mm", "reference")
    verdict = judge_call(KernelCall("grouped_mm", "reference", call), "cpu")
    assert verdict is None  # the law itself
    names = ("run", "run_swiglu", "swiglu", "permute", "gather", "combine")
    parts = {name: partial(getattr(law, name)) for name in names}
    verdict = judge_backend("grouped_mm", SimpleNamespace(supports=law.supports, **parts), adopt(call), "cpu")
    assert verdict, verdict.reason

    def wrong(name: str) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            made = getattr(law, name)(*given, **options)
            if isinstance(made, tuple):  # of `permute`
                return (made[0].flip(0), *made[1:])
            if isinstance(made, QTensor):
                return QTensor(made.data.roll(1, 0), made.scale, made.spec)
            return torch.cat([made[:-1], made[-1:] * 1.05])

        return run

    planted = SimpleNamespace(supports=law.supports, **{name: wrong(name) for name in names})
    assert not judge_backend("grouped_mm", planted, adopt(call), "cpu")


def adopt(call: Any) -> Any:
    return adapter_for("grouped_mm").adopt(call)


def test_an_attention_that_rounds_its_weights_to_16_bits_passes_where_keys_are_equal() -> None:
    """The weights of equal keys are rounded alike, so that a thousand errors add up: a correct kernel on an H200 was refused."""
    law = registry.backend("beam_attention", "reference")

    def flash(q, k, v, lengths, *, scale):
        s = torch.einsum("rbhd,rshd->rbhs", q.float(), k.float()) * scale
        p = torch.exp(s - s.amax(-1, keepdim=True))
        out = torch.einsum("rbhs,rshd->rbhd", p.bfloat16().float(), v.float())
        return (out / p.sum(-1, keepdim=True)).to(q.dtype)

    call = adapter_for("beam_attention").parse((1, 32, 3001), "2/2x64|shared")
    backend = SimpleNamespace(supports=law.supports, run=flash)
    verdict = judge_backend("beam_attention", backend, call, "cpu")
    assert verdict, verdict.reason
    backend = SimpleNamespace(supports=law.supports, run=lambda *given, **scale: flash(*given, **scale) * 1.02)
    assert not judge_backend("beam_attention", backend, call, "cpu")


def judge_planted(op: str, call: Any, **parts: Any) -> Any:
    """The verdict on a call of a model, by the reference with some functions replaced."""
    law, adapter = registry.backend(op, "reference"), adapter_for(op)
    names = ("run", "run_sorted", "beams", "ancestors", "permute", "gather")
    given = {name: partial(getattr(law, name)) for name in names if hasattr(law, name)}
    backend = SimpleNamespace(supports=law.supports, **(given | parts))
    return judge_backend(op, backend, adapter.adopt(call), "cpu", moved=False)


@pytest.mark.parametrize("requests", [1, 3])
def test_an_attention_that_ignores_the_lengths_of_requests_is_red(requests: int) -> None:
    """An engine pads requests, but its calls do not say that."""
    law = registry.backend("beam_attention", "reference")

    def run(q, k, v, lengths, *, scale):
        return law.run(q, k, v, torch.full_like(lengths, k.shape[1]), scale=scale)

    call = BeamAttentionCall(requests, 5, 4, 2, 40, 16)
    assert judge_planted("beam_attention", call)
    assert not judge_planted("beam_attention", call, run=run)


def keep_in_the_last_step(q, k, v, keys, values, table, *, keep, **options):
    if keep:
        keys[-1, :, : q.shape[1]], values[-1, :, : q.shape[1]] = k, v
    return registry.backend("beam_attention", "reference").ancestors(
        q, k, v, keys, values, table, keep=False, **options
    )


def take_beams_for_the_width(q, k, v, keys, values, table, **options):
    steps, requests, width, *rest = keys.shape
    sizes = steps, requests, q.shape[1], *rest
    mine = [t.flatten()[: t.numel() // width * q.shape[1]].view(sizes) for t in (keys, values)]
    return registry.backend("beam_attention", "reference").ancestors(
        q, k, v, *mine, table.clamp(max=q.shape[1] - 1), **options
    )


def keep_in_every_other_call():
    calls = []

    def ancestors(*given, keep, **options):
        calls.append(1)
        law = registry.backend("beam_attention", "reference")
        return law.ancestors(*given, keep=keep and len(calls) % 2 == 1, **options)

    return ancestors


def take_rows_as_contiguous(q, k, v, *given, **options):
    flat = [t.as_strided(t.shape, q.contiguous().stride()) for t in (q, k, v)]
    return registry.backend("beam_attention", "reference").ancestors(*flat, *given, **options)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [keep_in_the_last_step, take_beams_for_the_width, keep_in_every_other_call(), take_rows_as_contiguous],
    ids=["slot", "width", "every other call", "strides"],
)
def test_a_step_is_judged_on_operands_like_the_engines(wrong: Any, steps: int) -> None:
    """Their cache has room for more steps and beams, and what a step keeps is not there before."""
    call = AncestorAttentionCall(2, 5, 4, steps, 16, keep=True)
    assert judge_planted("beam_attention", call)
    assert not judge_planted("beam_attention", call, ancestors=wrong)


def test_a_permutation_that_is_wrong_where_an_expert_has_no_rows_is_red() -> None:
    def permute(ids, experts):
        order, offsets, inverse = registry.backend("grouped_mm", "reference").permute(ids, experts)
        empty = (offsets[1:] == offsets[:-1]).nonzero().flatten()
        offsets[empty] = 0
        return order, offsets, inverse

    call = MoveCall(500, 2, 8)
    assert judge_planted("grouped_mm", call)
    assert not judge_planted("grouped_mm", call, permute=permute)


def test_a_kernel_that_changes_its_operands_is_red() -> None:
    """What follows of the changed ones is right."""

    def gather(x, permutation):
        return registry.backend("grouped_mm", "reference").gather(x.clamp_(min=-1), permutation)

    call = MoveCall(20, 3, 4, torch.bfloat16, "gather", 64)
    assert judge_planted("grouped_mm", call)
    verdict = judge_planted("grouped_mm", call, gather=gather)
    assert "writes into its operands" in verdict.reason


def test_both_forms_of_routing_are_judged() -> None:
    """An engine's visits are sorted, which its calls do not say."""
    law = registry.backend("route", "reference")

    def turn(form):
        def run(*given, **options):
            *rest, gates = form(*given, **options)
            return *rest, gates.flip(1)

        return run

    call = RouterCall(40, 32, 8, 3)
    assert judge_planted("route", call)
    assert not judge_planted("route", call, run=turn(law.run))
    assert not judge_planted("route", call, run_sorted=turn(law.run_sorted))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("output", [1, 2], ids=["beams", "codes"])
def test_a_search_that_returns_other_places_with_its_own_sums_is_red(output: int, masked: bool) -> None:
    law = registry.backend("topk", "reference")

    def beams(*given, lse=None, **options):
        found = list(law.beams(*given, lse=lse, **options))
        if lse is None:
            found[output] = torch.where(found[output] > 0, found[output] - 1, found[output])
        return tuple(found)

    call = BeamTopkCall(2, 6, 50, 6, masked=masked)
    assert judge_planted("topk", call)
    assert not judge_planted("topk", call, beams=beams)
