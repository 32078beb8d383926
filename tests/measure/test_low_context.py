"""Attention to a context in E4M3 is judged: kernels that widen it and kernels that multiply in FP8 pass, wrong ones do not."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_interpreted
from loka.formats import Spec, quantize
from loka.kernels import registry
from loka.kernels.beam_attention.call import BeamAttentionCall
from loka.measure.adapter import adapter_for
from loka.measure.conformance import Conformance
from loka.measure.gate import OTHER_HEADROOM, OTHER_SETS, judge_backend
from loka.measure.kernel_calls import KernelCall, judge_call
from loka.measure.peaked import NAME as PEAKED

from .hopper import accumulate

CPU, LOW = torch.device("cpu"), torch.float8_e4m3fn
LAW = registry.backend("beam_attention", "reference")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def call(requests: int, beams: int, heads: int, groups: int, length: int, d: int, dtype=torch.bfloat16, **options: Any):
    return BeamAttentionCall(requests, beams, heads, groups, length, d, dtype, cache=LOW, **options)


SMALL = [
    call(1, 1, 4, 4, 37, 32),
    call(1, 40, 2, 2, 37, 32, torch.float16),
    call(3, 1, 4, 2, 48, 64),
    call(3, 20, 4, 2, 64, 32),
    call(2, 9, 4, 2, 33, 32, shared=True),
    call(2, 1, 3, 3, 1, 32),
    call(2, 5, 3, 1, 2, 32, torch.float32),
]
LONG = [call(1, 1, 8, 8, 1000, 64), call(2, 16, 2, 2, 1008, 64)]


class Fp8:
    """Attention as our FP8 kernel computes it: `block` keys at a time, in parts of `span`. `parts` of it may be replaced.

    Args:
        block, span: how the keys are divided.
        first: log2 of what weights are multiplied by before they are rounded.
        rounded: whether the denominator sums rounded weights.
        exact: whether sums are exact; otherwise as Hopper's tensor cores add.
        wide: whether nothing is rounded to FP8.
    """

    supports = staticmethod(LAW.supports)

    def __init__(
        self, block=32, span=1 << 20, *, first=8.0, rounded=False, exact=True, wide=False, **parts: Any
    ) -> None:
        self.block, self.span, self.first, self.rounded, self.exact = block, span, first, rounded, exact
        self.wide, self.parts = wide, parts

    def _part(self, name: str, value: Any, *more: Any) -> Any:
        return self.parts[name](value, *more) if name in self.parts else value

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T if self.exact else accumulate(a.double(), b.double(), 1 << 30).float()

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
        d, share = q.shape[3], q.shape[2] // k.shape[2]
        low = quantize(q.reshape(-1, d), Spec.parse("e4m3:row"))
        made = torch.ones(q.shape[:3]) if self.wide else self._part("scales", low.scale.view(q.shape[:3]).clone())
        q8 = q.float() if self.wide else low.data.float().view(q.shape)
        out = torch.zeros_like(q)
        for r in range(q.shape[0]):
            n = self._part("length", int(lengths[r]), k.shape[1])
            for h in range(q.shape[2]):
                mine = self._part("head", h, q.shape[2]) // share
                keys, values = k[r, :n, h // share].float(), v[r, :n, mine].float()
                s = self.dot(q8[r, :, h], keys) * made[r, :, h, None] * self._part("scale", scale)
                out[r, :, h] = self.attend(self._part("scores", s), values).to(q.dtype)
        return self._part("out", out)

    def attend(self, s: Tensor, values: Tensor) -> Tensor:
        sums = []
        for start in self._part("spans", list(range(0, s.shape[1], self.span))):
            m, total, acc = torch.full((len(s),), -torch.inf), torch.zeros(len(s)), torch.zeros(len(s), values.shape[1])
            for at in range(start, min(start + self.span, s.shape[1]), self.block):
                some = slice(at, min(at + self.block, start + self.span))
                higher = torch.maximum(m, s[:, some].amax(1))
                p = torch.exp(s[:, some] - higher[:, None]) * 2**self.first
                p8 = p if self.wide else p.clamp(max=448).to(LOW).float()
                shrink = torch.exp(m - higher)
                total = total * shrink + (p8 if self.rounded else p).sum(1)
                acc = acc * shrink[:, None] + self.dot(p8, values[some].T)
                m = higher
            sums.append((m, total, acc))
        if not sums:
            return torch.zeros(len(s), values.shape[1])
        top = torch.stack([m for m, *_ in sums]).amax(0)
        weights = [torch.exp(m - top) for m, *_ in sums]
        total = sum(w * t for w, (_, t, _) in zip(weights, sums, strict=True))
        acc = sum(w[:, None] * a for w, (*_, a) in zip(weights, sums, strict=True))
        return self._part("divided", acc / total[:, None], acc)


def judge(backend: Any, call: Any) -> Conformance:
    return judge_backend("beam_attention", backend, adapter_for("beam_attention").adopt(call), "cpu", moved=False)


CORRECT = {
    "blocks": Fp8(),
    "one block": Fp8(1 << 20),
    "parts": Fp8(32, 32),
    "rounded denominator": Fp8(rounded=True),
    "larger weights": Fp8(first=8.7),
    "widened": Fp8(wide=True),
    "reference": SimpleNamespace(supports=LAW.supports, run=lambda *given, scale: LAW.run(*given, scale=scale)),
}


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("call", SMALL + LONG, ids=str)
def test_a_correct_kernel_passes(call: BeamAttentionCall, name: str) -> None:
    """The gate allows twice the tolerance, so that the margin is at least two."""
    verdict = judge(CORRECT[name], call)
    assert verdict, verdict.reason
    assert verdict.error <= 1.0, verdict


@pytest.mark.parametrize("call", [call(1, 4, 2, 1, 1000, 32), call(1, 2, 2, 1, 3000, 128)], ids=str)
def test_a_kernel_that_adds_as_tensor_cores_do_passes(call: BeamAttentionCall) -> None:
    verdict = judge(Fp8(128, exact=False), call)
    assert verdict, verdict.reason
    assert verdict.error <= 1.0, verdict


def check_lengths(backend: Any, call: BeamAttentionCall, lengths: list[int]) -> None:
    """By the adapter, whose tolerance is half the gate's, on every set."""
    adapter = adapter_for("beam_attention")
    adopted = adapter.adopt(call)
    for seed, name in enumerate((*OTHER_SETS, PEAKED)):
        operands = adapter.operands(adopted, seed=seed, distribution=name, device=CPU)
        operands.lengths.copy_(torch.tensor(lengths))
        verdict = adapter.check(backend, adopted, operands)
        assert verdict, f"{name}: {verdict.reason}"


def test_equal_keys_behind_the_end_do_not_condemn_a_correct_kernel() -> None:
    """Errors of equal keys add up along their common value, which keys behind the end have, too."""
    adapter = adapter_for("beam_attention")
    adopted = adapter.adopt(call(1, 1, 3, 3, 40, 128, torch.float16, shared=True))
    operands = adapter.operands(adopted, seed=55, distribution="alike_rows", device=CPU)
    verdict = adapter.check(Fp8(64, first=8.7), adopted, operands)
    assert verdict, verdict.reason


LENGTHS = [
    (call(4, 1, 4, 4, 37, 32), [0, 1, 31, 37]),
    (call(4, 9, 2, 1, 80, 32, torch.float16), [80, 64, 17, 0]),
    (call(3, 5, 2, 2, 66, 64, torch.float32), [2, 66, 33]),
    (call(3, 70, 3, 1, 64, 32), [64, 63, 16]),
    (call(2, 9, 4, 2, 33, 32, shared=True), [33, 0]),
    (call(2, 9, 4, 2, 33, 24, torch.float16), [33, 20]),  # a width that our kernel widens
]


@pytest.mark.parametrize(("call", "lengths"), LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["blocks", "parts", "reference", "torch"])
def test_lengths_from_none_to_all(call: BeamAttentionCall, lengths: list[int], name: str) -> None:
    backend = CORRECT[name] if name in CORRECT else registry.backend("beam_attention", name)
    check_lengths(backend, call, lengths)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the child of the test below")
@pytest.mark.parametrize(("call", "lengths"), LENGTHS, ids=str)
def test_our_interpreted_kernel(call: BeamAttentionCall, lengths: list[int]) -> None:
    """Without the set with a NaN: the interpreter's FP8 has none."""
    check_lengths(registry.backend("beam_attention", "triton"), call, lengths)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        call(1, 1, 11, 11, 3001, 128),
        call(8, 1, 11, 11, 3008, 128),
        call(2, 512, 4, 4, 3008, 128),
        call(2, 50, 4, 2, 37, 32),
    ],
    ids=str,
)
def test_our_kernel_passes_on_a_gpu(call: BeamAttentionCall) -> None:
    verdict = judge_call(KernelCall("beam_attention", "triton", call), "cuda")
    assert verdict is not None
    assert verdict, verdict.reason
    assert verdict.error <= 1.0, verdict


def replaced(index: Any, factor: float) -> Any:
    def change(scales: Tensor) -> Tensor:
        scales[index] *= factor
        return scales

    return change


def without(*keys: int) -> Any:
    """Scores of which some count nothing, unless they are all there are."""

    def change(s: Tensor) -> Tensor:
        s = s.clone()
        for key in keys if s.shape[1] > 1 else ():
            s[:, key] = -torch.inf
        return s

    return change


def twice(s: Tensor) -> Tensor:
    s = s.clone()
    s[:, -1:] += 0.6931
    return s


WRONG = {
    "lengths ignored": {"length": lambda n, s: s},
    "one key too many": {"length": lambda n, s: min(n + 1, s)},
    "one key too few": {"length": lambda n, s: max(n - 1, min(n, 1))},
    "first key left out": {"scores": without(0)},
    "last key left out": {"scores": without(-1)},
    "last key counted twice": {"scores": twice},
    "scale of a head forgotten": {
        "scales": lambda made: replaced((slice(None), slice(None), 1), float(1 / made[0, 0, 1]))(made)
    },
    "scale of a head of its neighbor": {"scales": lambda made: made[:, :, [0, 0, *range(2, made.shape[2])]]},
    "scale of a request forgotten": {"scales": lambda made: torch.cat([made[:-1], torch.ones_like(made[-1:])])},
    "scores 5 % off": {"scale": lambda scale: scale * 1.05},
    "scores 5 % low": {"scale": lambda scale: scale * 0.95},
    "not divided": {"divided": lambda divided, acc: acc / 256},
    "result 2 % off": {"divided": lambda divided, acc: divided * 1.02},
    "values of another head": {"head": lambda h, heads: (h + 1) % heads},
    "beams swapped": {"out": lambda out: out.roll(1, 1)},
    "one part dropped": {"spans": lambda starts: starts[:-1] or starts},
    "one part twice": {"spans": lambda starts: [*starts, starts[-1]] if len(starts) > 1 else starts},
}
CASES = [*SMALL[:5], *LONG]
OF_QUERIES = [name for name in WRONG if name.startswith("scale of")]  # a kernel that widens a context has no scales


def shows(name: str, call: BeamAttentionCall, span: int) -> bool:
    """Whether the mistake changes anything in this call; of a factor in all of a result, whether there is enough of it."""
    few = call.requests * call.beams * call.heads * call.d < 2000
    return {
        "values of another head": call.groups > 1,
        "beams swapped": call.beams > 1,
        "one part dropped": call.length > span,
        "one part twice": call.length > span,
        "result 2 % off": call.d >= 32 and call.beams >= 16 and not few and call.dtype != torch.float16,
    }.get(name, True)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", CASES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["fp8", "widened"])
def test_a_wrong_kernel_is_refused(wide: bool, call: BeamAttentionCall, name: str) -> None:
    span = 32 if call.length < 100 else 64
    if not shows(name, call, span) or (wide and name in OF_QUERIES):
        pytest.skip("changes nothing, or too little")
    verdict = judge(Fp8(32, span, wide=wide, **WRONG[name]), call)
    assert not verdict
    assert verdict.error > OTHER_HEADROOM


@pytest.mark.parametrize("name", ["one key too many", "one key too few", "one part dropped", "scores 5 % off"])
def test_one_beam_of_a_large_model_shows_each_of_its_3000_keys(name: str) -> None:
    assert not judge(Fp8(128, 256, **WRONG[name]), call(1, 1, 11, 11, 3001, 128))


def test_a_wrong_result_in_one_place_or_of_another_type_is_refused() -> None:
    def one_off(out: Tensor) -> Tensor:
        out[0, -1, -1, -1] += 0.5
        return out

    assert not judge(Fp8(out=one_off), SMALL[3])
    assert not judge(Fp8(out=Tensor.float), SMALL[3])
    assert not judge(Fp8(out=lambda out: out[:, :-1]), SMALL[3])


def test_weights_that_are_rounded_more_coarsely_are_refused() -> None:
    """Not multiplied by 256, small weights lose their bits."""
    verdict = judge(Fp8(first=0.0), LONG[1])
    assert not verdict, verdict
    assert judge(Fp8(first=0.0, wide=True), LONG[1])
