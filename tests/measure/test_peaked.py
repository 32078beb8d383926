"""A scale of the scores that is 2 % off is red in every attention; correct kernels that round to 16 bits pass by a wide margin."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.formats import Spec, quantize
from loka.kernels import registry
from loka.kernels.attention.call import AttentionCall
from loka.kernels.beam_attention import reference
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.measure import peaked
from loka.measure.adapter import adapter_for
from loka.measure.gate import judge_backend

CPU = torch.device("cpu")
ROWS = Spec.parse("e4m3:row")
HALF = torch.float16
SOFTMAX = [
    ("beam_attention", AncestorAttentionCall(2, 5, 4, 1, 16)),
    ("beam_attention", AncestorAttentionCall(1, 1, 1, 1, 16)),
    ("beam_attention", AncestorAttentionCall(2, 5, 4, 1, 16, HALF)),
    ("beam_attention", AncestorAttentionCall(2, 5, 4, 2, 64, keep=True)),
    ("beam_attention", AncestorAttentionCall(3, 6, 11, 2, 128, keep=True, spec=ROWS)),
    ("beam_attention", AncestorAttentionCall(1, 1, 1, 1, 16, HALF, spec=ROWS)),
    ("beam_attention", AncestorAttentionCall(1, 1, 1, 1, 16, spec=ROWS)),
    ("beam_attention", AncestorAttentionCall(2, 4, 4, 3, 32, torch.float32)),
    ("beam_attention", BeamAttentionCall(1, 1, 1, 1, 3, 16)),
    ("beam_attention", BeamAttentionCall(2, 9, 4, 2, 8, 16)),
    ("beam_attention", BeamAttentionCall(2, 9, 4, 2, 12, 16, shared=True)),
    ("beam_attention", BeamAttentionCall(2, 9, 4, 2, 40, 16, HALF, shared=True)),
    ("masked_attention", MaskedAttentionCall(3, 5, 5, 2, 2, 16)),
    ("masked_attention", MaskedAttentionCall(3, 40, 40, 2, 2, 16)),
    ("masked_attention", MaskedAttentionCall(3, 8, 40, 4, 2, 32, HALF)),
]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """Attention of a fused kernel: q [.., b, d], k and v [.., s, d], with weights rounded before they multiply values."""
    s = q.float() @ k.float().mT * scale
    s = s if seen is None else s.masked_fill(~seen, float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return ((p.to(q.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)


def make(op: str, *, off: float = 1.0) -> Any:
    """A backend that rounds to 16 bits where kernels do, with a scale that is off by a factor."""
    law = registry.backend(op, "reference")

    def ancestors(q: Tensor, k: Tensor, v: Tensor, *cache: Tensor, keep: bool, spec: Spec | None, scale: float) -> Any:
        past_k, past_v = (t.movedim(0, 3) for t in reference.collect(k, v, *cache, keep=keep))
        out = attend(q[..., None, :], past_k, past_v, scale * off)[..., 0, :]
        return out if spec is None else quantize(out.reshape(-1, q.shape[2] * q.shape[3]), spec)

    def beams(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
        share = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(share, 2).transpose(1, 2) for t in (k, v))
        seen = (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
        v = torch.where(seen.mT, v, 0)
        return attend(q.transpose(1, 2), k, v, scale * off, seen).transpose(1, 2)

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = attend(q, k, v, scale * off, mask[:, None, None])
        return out if wanted is None else torch.where(wanted[:, None, :, None], out, 0)

    run = beams if op == "beam_attention" else masked
    return SimpleNamespace(supports=law.supports, run=run, ancestors=ancestors)


def judge(op: str, call: Any, backend: Any) -> Any:
    return judge_backend(op, backend, adapter_for(op).adopt(call), "cpu", moved=False)


def check_peaked(op: str, call: Any, backend: Any) -> Any:
    adapter = adapter_for(op)
    call = adapter.adopt(call)
    operands = adapter.operands(call, seed=5, distribution=peaked.NAME, device=CPU)
    return adapter.check(backend, call, operands)


@pytest.mark.parametrize(("op", "call"), SOFTMAX, ids=str)
@pytest.mark.parametrize("off", [0.98, 1.02])
def test_a_scale_that_is_off_by_two_percent_is_red(op: str, call: Any, off: float) -> None:
    assert not judge(op, call, make(op, off=off))


@pytest.mark.parametrize(("op", "call"), SOFTMAX, ids=str)
def test_a_correct_kernel_passes_by_a_wide_margin(op: str, call: Any) -> None:
    """The gate allows twice the tolerance. Of a result in FP8, rounding alone takes half of that."""
    verdict = judge(op, call, make(op))
    assert verdict, verdict.reason
    verdict = check_peaked(op, call, make(op))
    assert verdict.error < (1.0 if getattr(call, "spec", None) else 0.4) * verdict.tolerance


@pytest.mark.parametrize(("op", "call"), SOFTMAX, ids=str)
def test_torch_passes(op: str, call: Any) -> None:
    backend = registry.backend(op, "torch")
    if not backend.supports(call, CPU):
        pytest.skip("torch does not run it on a CPU")
    assert check_peaked(op, call, backend)  # not the whole gate: on a CPU torch hides a NaN


@pytest.mark.parametrize("call", [AttentionCall(1, 4, 1, 16, 16), AttentionCall(3, 40, 2, 16, 32)], ids=str)
@pytest.mark.parametrize("off", [0.98, 1.0, 1.02])
def test_silu_attention_shows_scores_that_are_off(call: AttentionCall, off: float) -> None:
    """Nothing normalizes its weights."""
    law = registry.backend("attention", "reference")

    def run(*, q: Tensor, **rest: Any) -> Tensor:
        wide = {name: t.float() if name in ("k", "v") else t for name, t in rest.items()}
        return law.run(q=q.float() * off, **wide).to(q.dtype)

    assert judge("attention", call, SimpleNamespace(supports=law.supports, run=run)).ok is (off == 1)
