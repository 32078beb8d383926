"""Attention of beams: the law against plain softmax loops, every backend against the law.

Where there is no GPU the Triton tests need the interpreter, chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import os
import subprocess
import sys

import pytest
import torch

from loka.kernels import registry
from loka.kernels.beam_attention import AncestorAttentionCall, BeamAttentionCall, ancestor_attention, beam_attention
from loka.measure.adapter import adapter_for
from loka.measure.conformance import poisoned_allocations

CUDA = torch.device("cuda")


def make(requests, beams, heads, groups, context, d, *, dtype=torch.float32, shared=False, lengths=None, device="cpu"):
    """Operands whose unused positions are NaN: nobody may look at them."""
    g = torch.Generator().manual_seed(beams * context)
    q = torch.randn(requests, beams, heads, d, generator=g).to(device, dtype)
    k = torch.randn(requests, context, groups, d, generator=g).to(device, dtype)
    v = k if shared else torch.randn(requests, context, groups, d, generator=g).to(device, dtype)
    lengths = [context] * requests if lengths is None else lengths
    for r, n in enumerate(lengths):
        k[r, n:] = float("nan")
        v[r, n:] = float("nan")
    return q, k, v, torch.tensor(lengths, device=device)


def by_hand(q, k, v, lengths, scale):
    out = torch.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for r, n in enumerate(lengths.tolist()):
        for b in range(q.shape[1]):
            for h in range(q.shape[2]):
                if n:
                    weights = torch.softmax(k[r, :n, h // share] @ q[r, b, h] * scale, 0)
                    out[r, b, h] = weights @ v[r, :n, h // share]
    return out


CASES = [
    (2, 5, 4, 2, 20, 16, {"lengths": [13, 0]}),
    (1, 1, 3, 3, 5, 24, {}),
    (3, 20, 2, 1, 33, 32, {"shared": True, "lengths": [33, 16, 1]}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_same_as_loops(case, backend: str) -> None:
    *sizes, options = case
    operands = make(*sizes, dtype=torch.float64, **options)
    torch.testing.assert_close(beam_attention(*operands, scale=0.3, backend=backend), by_hand(*operands, 0.3))


def test_scale_defaults_to_the_root_of_the_width(device) -> None:
    q, k, v, lengths = make(1, 3, 2, 2, 6, 16, device=device)
    torch.testing.assert_close(beam_attention(q, k, v, lengths), beam_attention(q, k, v, lengths, scale=0.25))


def test_no_context_at_all(device) -> None:
    q = torch.randn(2, 3, 2, 16, device=device)
    k = torch.zeros(2, 0, 2, 16, device=device)
    for backend in ("reference", "torch"):
        out = beam_attention(q, k, k, torch.zeros(2, dtype=torch.int32, device=device), backend=backend)
        assert out.eq(0).all()


def ancestry(requests, beams, heads, steps, d, *, wide, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(steps)
    q = torch.randn(requests, beams, heads, d, generator=g).to(device, dtype)
    k, v = (torch.randn(steps, requests, wide, heads, d, generator=g).to(device, dtype) for _ in range(2))
    table = torch.randint(0, wide, (steps, requests, beams), generator=g, dtype=torch.int32).to(device)
    return q, k, v, table


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_ancestors_are_gathered(backend: str) -> None:
    q, k, v, table = ancestry(2, 5, 3, 3, 16, wide=7, dtype=torch.float64)
    out = ancestor_attention(q, k, v, table, scale=0.4, backend=backend)
    for r in range(2):
        for b in range(5):
            keys = torch.stack([k[p, r, table[p, r, b]] for p in range(3)])
            vals = torch.stack([v[p, r, table[p, r, b]] for p in range(3)])
            weights = torch.softmax(torch.einsum("hd,phd->hp", q[r, b], keys) * 0.4, -1)
            torch.testing.assert_close(out[r, b], torch.einsum("hp,phd->hd", weights, vals))


def test_ancestors_equal_reordered_caches() -> None:
    """What the table saves: moving every key and value whenever beams are reordered."""
    q, k, v, _ = ancestry(1, 4, 2, 2, 8, wide=4)
    parents = torch.tensor([2, 2, 0, 1])
    moved_k, moved_v = (torch.stack([t[0][:, parents], t[1]]) for t in (k, v))
    here = torch.arange(4, dtype=torch.int32).expand(2, 1, 4).contiguous()
    table = here.clone()
    table[0, 0] = parents.int()
    torch.testing.assert_close(ancestor_attention(q, k, v, table), ancestor_attention(q, moved_k, moved_v, here))


def test_mistakes_are_named() -> None:
    q, k, v, lengths = make(2, 3, 4, 2, 6, 16)
    with pytest.raises(ValueError, match=r"q \[R, B, H, D\] and k, v \[R, S, G, D\]"):
        beam_attention(q, k[:1], v[:1], lengths)
    with pytest.raises(ValueError, match=r"lengths must be int32 or int64 \[2\]"):
        beam_attention(q, k, v, lengths.float())
    with pytest.raises(ValueError, match="one dtype"):
        beam_attention(q, k.half(), v, lengths)
    with pytest.raises(ValueError, match="groups must divide the 4 heads, got 3"):
        beam_attention(q, *(torch.zeros(2, 6, 3, 16) for _ in range(2)), lengths)
    q, k, v, table = ancestry(2, 5, 3, 3, 16, wide=7)
    with pytest.raises(ValueError, match=r"ancestors \[P, R, B\]"):
        ancestor_attention(q, k, v, table[:, :1])
    with pytest.raises(ValueError, match="ancestors must be int32"):
        ancestor_attention(q, k, v, table.long())


def test_triton_says_why_not() -> None:
    triton = registry.backend("beam_attention", "triton")
    assert "float64" in triton.supports(BeamAttentionCall(1, 1, 1, 1, 4, 16, torch.float64), CUDA).reason
    assert "at most 256" in triton.supports(BeamAttentionCall(1, 1, 1, 1, 4, 300), CUDA).reason
    assert "without a past" in triton.supports(AncestorAttentionCall(1, 1, 1, 0, 16), CUDA).reason


def triton_runs(device: torch.device) -> bool:
    call = BeamAttentionCall(1, 1, 1, 1, 4, 16, torch.float32)
    return bool(registry.backend("beam_attention", "triton").supports(call, device))


@pytest.fixture
def triton_device(device):
    if not triton_runs(device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


@pytest.mark.slow
def test_triton_in_the_interpreter(device) -> None:
    if triton_runs(device):
        pytest.skip("Triton runs in this process")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "on_triton"]
    child = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout
    assert "....." in child.stdout
    assert "neither on a GPU" not in child.stdout


def assert_near(ours: torch.Tensor, law: torch.Tensor, tolerance: float) -> None:
    assert torch.equal(ours.isnan(), law.isnan())
    error = (ours.double() - law.double()).norm() / law.double().norm()
    assert error < tolerance


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_triton_same_as_the_law(triton_device, case, dtype: torch.dtype) -> None:
    *sizes, options = case
    operands = make(*sizes, dtype=dtype, device=triton_device, **options)
    law = beam_attention(*operands, scale=0.3, backend="reference")
    with poisoned_allocations():
        out = beam_attention(*operands, scale=0.3, backend="triton")
    assert_near(out, law, TOLERANCE[dtype])
    with pytest.raises(AssertionError):
        assert_near(out * (1 + 4 * TOLERANCE[dtype]), law, TOLERANCE[dtype])


def test_on_triton_operands_inside_others(triton_device) -> None:
    """Queries that are a slice of a projection, keys of one layer out of many."""
    q, k, v, lengths = make(2, 5, 4, 2, 20, 16, device=triton_device)
    wide_q = torch.cat([q, q], -1)[..., :16]
    wide_k, wide_v = (torch.stack([t, t], 1)[:, 1] for t in (k, v))
    out = beam_attention(wide_q, wide_k, wide_v, lengths, backend="triton")
    assert_near(out, beam_attention(q, k, v, lengths, backend="reference"), 1e-5)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("d", [16, 24])
def test_on_triton_ancestors(triton_device, steps: int, d: int) -> None:
    q, k, v, table = ancestry(2, 5, 3, steps, d, wide=7, device=triton_device)
    law = ancestor_attention(q, k, v, table, backend="reference")
    with poisoned_allocations():
        out = ancestor_attention(q, k, v, table, backend="triton")
    assert_near(out, law, 1e-5)


def test_on_triton_compiles_to_one_graph(triton_device) -> None:
    registry.load("beam_attention")  # torch.compile cannot trace an import
    q, k, _, lengths = make(2, 5, 4, 2, 20, 16, device=triton_device)
    past = ancestry(2, 5, 4, 2, 16, wide=5, device=triton_device)

    def both(q, k, lengths, kp, vp, table):
        h = beam_attention(q, k, k, lengths, backend="triton")
        return ancestor_attention(h, kp, vp, table, backend="triton")

    compiled = torch.compile(both, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, lengths, *past[1:]), both(q, k, lengths, *past[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 512, 512), (2, 512, 3000), (3, 1, 3000), (1, 100, 77)])
@pytest.mark.parametrize("variant", ["11/11x128|shared|ragged", "8/2x128|ragged", "4/4x64|shared", "4/1x80|float16"])
def test_every_backend_conforms_on_a_gpu(shape: tuple[int, int, int], variant: str) -> None:
    adapter = adapter_for("beam_attention")
    (call,) = adapter.calls([shape], [variant])
    operands = adapter.operands(call, seed=2, distribution="normal", device=CUDA)
    for name in ("triton", "torch"):
        verdict = adapter.check(registry.backend("beam_attention", name), call, operands)
        assert verdict, f"{name}: {verdict.reason}"


@pytest.mark.gpu
def test_a_request_does_not_depend_on_its_neighbours_on_a_gpu() -> None:
    """Alone and in a batch: the same bits, which is what batch invariance is built on."""
    q, k, v, lengths = make(3, 200, 4, 4, 333, 128, dtype=torch.bfloat16, lengths=[100, 333, 64], device="cuda")
    together = beam_attention(q, k, v, lengths, backend="triton")
    for r in range(3):
        alone = beam_attention(q[r : r + 1], k[r : r + 1], v[r : r + 1], lengths[r : r + 1], backend="triton")
        assert torch.equal(alone[0], together[r])
