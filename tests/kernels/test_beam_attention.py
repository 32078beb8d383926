"""Attention of beams: the law against plain softmax loops, every backend against the law.

Where there is no GPU the Triton tests need the interpreter, chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import pytest
import torch

from kernels.interpreter import run_interpreted
from loka.formats import E4M3, ROW, Spec, dequantize, quantize
from loka.inference.context import round_context
from loka.kernels import registry
from loka.kernels.backend import no
from loka.kernels.beam_attention import AncestorAttentionCall, BeamAttentionCall, ancestor_attention, beam_attention
from loka.kernels.beam_attention.triton_low_kernels import _columns_descriptor
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
    (2, 9, 4, 2, 80, 32, {"lengths": [80, 67]}),
    (
        4,
        1,
        3,
        1,
        98,
        16,
        {"shared": True, "lengths": [98, 33, 0, 34]},
    ),  # parts of 32 keys after the first, where interpreted
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_same_as_loops(case, backend: str) -> None:
    *sizes, options = case
    operands = make(*sizes, dtype=torch.float64, **options)
    torch.testing.assert_close(beam_attention(*operands, scale=0.3, backend=backend), by_hand(*operands, 0.3))


def in_fp8(operands):
    """The same with keys and values in E4M3; where they are one they stay one."""
    q, k, v, lengths = operands
    low = k.to(torch.float8_e4m3fn)
    return q, low, low if v is k else v.to(torch.float8_e4m3fn), lengths


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_context_in_fp8_counts_as_it_is(case, backend: str) -> None:
    *sizes, options = case
    q, k, v, lengths = in_fp8(make(*sizes, **options))
    out = beam_attention(q, k, v, lengths, scale=0.3, backend=backend)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, by_hand(q, k.float(), v.float(), lengths, 0.3))


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
    """A step's q, k, v as slices of one projection, caches of `steps` steps with NaN in the room after them, and who descends from whom."""
    g = torch.Generator().manual_seed(steps)
    qkv = torch.randn(requests, beams, 3, heads, d, generator=g).to(device, dtype)
    caches = torch.full((2, steps + 2, requests, wide, heads, d), float("nan"))
    caches[:, :steps] = torch.randn(2, steps, requests, wide, heads, d, generator=g)
    table = torch.randint(0, wide, (steps, requests, beams), generator=g, dtype=torch.int32).to(device)
    return *qkv.unbind(2), *caches.to(device, dtype).unbind(0), table


def copied(operands):
    """With caches of their own."""
    q, k, v, keys, values, table = operands
    return q, k, v, keys.clone(), values.clone(), table


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_ancestors_are_gathered(backend: str, steps: int) -> None:
    operands = ancestry(2, 5, 3, steps, 16, wide=7, dtype=torch.float64)
    q, k, v, keys, values, table = operands
    before = keys.clone(), values.clone()
    out = ancestor_attention(*operands, scale=0.4, backend=backend)
    for r in range(2):
        for b in range(5):
            mine = torch.stack([*(before[0][p, r, table[p, r, b]] for p in range(steps)), k[r, b]])
            vals = torch.stack([*(before[1][p, r, table[p, r, b]] for p in range(steps)), v[r, b]])
            weights = torch.softmax(torch.einsum("hd,phd->hp", q[r, b], mine) * 0.4, -1)
            torch.testing.assert_close(out[r, b], torch.einsum("hp,phd->hd", weights, vals))
    assert_filed(operands, before)


def assert_filed(operands, before) -> None:
    """The step's keys and values are where the next one looks for them, and nothing else has changed."""
    _, k, v, keys, values, table = operands
    steps, _, beams = table.shape
    for cache, new, old in ((keys, k, before[0]), (values, v, before[1])):
        assert torch.equal(cache[steps, :, :beams], new)
        assert torch.equal(cache[:steps], old[:steps])
        assert cache[steps, :, beams:].isnan().all()
        assert cache[steps + 1].isnan().all()


def test_ancestors_equal_reordered_caches() -> None:
    """What the table saves: moving every key and value whenever beams are reordered."""
    q, k, v, keys, values, _ = ancestry(1, 4, 2, 2, 8, wide=4)
    parents = torch.tensor([2, 2, 0, 1])
    moved = [torch.cat([t[:1][:, :, parents], t[1:]]) for t in (keys, values)]
    here = torch.arange(4, dtype=torch.int32).expand(2, 1, 4).contiguous()
    table = here.clone()
    table[0, 0] = parents.int()
    ours = ancestor_attention(q, k, v, keys, values, table, keep=False)
    torch.testing.assert_close(ours, ancestor_attention(q, k, v, *moved, here, keep=False))
    assert keys[2:].isnan().all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_quantised_result_is_the_result_quantised(backend: str) -> None:
    operands = ancestry(2, 5, 3, 2, 16, wide=7)
    spec = Spec.parse("e4m3:row")
    plain = ancestor_attention(*copied(operands), backend=backend)
    low = ancestor_attention(*copied(operands), spec=spec, backend=backend)
    expected = quantize(plain.reshape(10, 48), spec)
    assert torch.equal(low.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(low.scale, expected.scale)


def test_mistakes_are_named() -> None:
    q, k, v, lengths = make(2, 3, 4, 2, 6, 16)
    with pytest.raises(ValueError, match=r"q \[R, B, H, D\] and k, v \[R, S, G, D\]"):
        beam_attention(q, k[:1], v[:1], lengths)
    with pytest.raises(ValueError, match=r"lengths must be int32 or int64 \[2\]"):
        beam_attention(q, k, v, lengths.float())
    with pytest.raises(ValueError, match="one dtype"):
        beam_attention(q, k.half(), v, lengths)
    with pytest.raises(ValueError, match="or k and v be float8_e4m3fn"):
        beam_attention(q, k.to(torch.float8_e4m3fn), v, lengths)
    with pytest.raises(ValueError, match="groups must divide the 4 heads, got 3"):
        beam_attention(q, *(torch.zeros(2, 6, 3, 16) for _ in range(2)), lengths)
    q, k, v, keys, values, table = ancestry(2, 5, 3, 3, 16, wide=7)
    with pytest.raises(ValueError, match=r"ancestors \[P, R, B\]"):
        ancestor_attention(q, k, v, keys, values, table[:, :1])
    with pytest.raises(ValueError, match="room for step P"):
        ancestor_attention(q, k, v, keys[:3], values[:3], table)
    with pytest.raises(ValueError, match="room for step P"):
        ancestor_attention(q, k, v, keys[:, :, :4], values[:, :, :4], table)
    with pytest.raises(ValueError, match="ancestors must be int32"):
        ancestor_attention(q, k, v, keys, values, table.long())
    with pytest.raises(ValueError, match="must have one dtype"):
        ancestor_attention(q, k, v, keys.half(), values.half(), table)


def test_triton_says_why_not() -> None:
    triton = registry.backend("beam_attention", "triton")
    assert "float64" in triton.supports(BeamAttentionCall(1, 1, 1, 1, 4, 16, torch.float64), CUDA).reason
    assert "at most 256" in triton.supports(BeamAttentionCall(1, 1, 1, 1, 4, 300), CUDA).reason
    assert "float64" in triton.supports(AncestorAttentionCall(1, 1, 1, 0, 16, torch.float64), CUDA).reason


def triton_runs(device: torch.device) -> bool:
    call = BeamAttentionCall(1, 1, 1, 1, 4, 16, torch.float32)
    return bool(registry.backend("beam_attention", "triton").supports(call, device))


def test_triton_writes_fp8_only_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = registry.backend("beam_attention", "triton")
    monkeypatch.setattr(triton, "triton_runs_on", lambda device: no("this GPU has 8.0"))
    for spec, refused in (("e4m3:row", True), ("e4m3:1x128", False)):  # groups are quantised by an op of their own
        call = AncestorAttentionCall(1, 1, 2, 0, 128, torch.float16, spec=Spec.parse(spec))
        assert ("8.0" in triton.supports(call, CUDA).reason) == refused


@pytest.fixture
def triton_device(device):
    if not triton_runs(device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


@pytest.mark.slow
def test_triton_in_the_interpreter(device) -> None:
    if triton_runs(device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_triton_a_context_in_fp8(triton_device, case) -> None:
    *sizes, options = case
    q, *rest = in_fp8(make(*sizes, dtype=torch.float16, device=triton_device, **options))
    with poisoned_allocations():
        out = beam_attention(q, *rest, scale=0.3, backend="triton")
    if q.shape[3] < 32:  # too narrow for products in FP8: the context is widened, and nothing else rounded
        assert_near(out, beam_attention(q, *rest, scale=0.3, backend="reference"), TOLERANCE[torch.float16])
        return
    low = quantize(q.flatten(0, 2), Spec(format=E4M3, block=ROW))
    rounded = dequantize(low).view(q.shape).to(q.dtype)
    law = beam_attention(rounded, *rest, scale=0.3, backend="reference")
    assert_near(out, law, 0.02)  # the weights are rounded too, to 3 bits each
    with pytest.raises(AssertionError):
        assert_near(out, beam_attention(rounded, *rest, scale=0.33, backend="reference"), 0.02)


def test_on_triton_a_nan_is_seen_by_requests_with_a_single_key(triton_device) -> None:
    q, k, v, lengths = make(2, 3, 2, 1, 20, 16, lengths=[1, 2], device=triton_device)
    q[:, 1, 0] = float("nan")
    found = beam_attention(q, k, v, lengths, backend="triton").isnan()
    assert found[:, 1, 0].all()
    assert found.sum() == found[:, 1, 0].numel()


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_on_triton_a_scale_may_be_zero_or_negative(triton_device, scale: float) -> None:
    operands = make(2, 5, 4, 2, 20, 16, lengths=[20, 7], device=triton_device)
    out = beam_attention(*operands, scale=scale, backend="triton")
    assert_near(out, beam_attention(*operands, scale=scale, backend="reference"), 1e-5)


def test_on_triton_operands_inside_others(triton_device) -> None:
    """Queries that are a slice of a projection, keys of one layer out of many."""
    q, k, v, lengths = make(2, 5, 4, 2, 20, 16, device=triton_device)
    wide_q = torch.cat([q, q], -1)[..., :16]
    wide_k, wide_v = (torch.stack([t, t], 1)[:, 1] for t in (k, v))
    out = beam_attention(wide_q, wide_k, wide_v, lengths, backend="triton")
    assert_near(out, beam_attention(q, k, v, lengths, backend="reference"), 1e-5)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("d", [16, 24])
def test_on_triton_ancestors(triton_device, steps: int, d: int) -> None:
    operands = ancestry(2, 5, 3, steps, d, wide=7, device=triton_device)
    law = ancestor_attention(*copied(operands), backend="reference")
    before = operands[3].clone(), operands[4].clone()
    with poisoned_allocations():
        out = ancestor_attention(*operands, backend="triton")
    assert_near(out, law, 1e-5)
    assert_filed(operands, before)
    ours = copied((*operands[:3], *before, operands[5]))
    assert torch.equal(ancestor_attention(*ours, keep=False, backend="triton"), out)
    assert torch.equal(ours[3].isnan(), before[0].isnan())


def test_on_triton_ancestors_in_any_layout(triton_device) -> None:
    q, k, v, keys, values, table = ancestry(2, 5, 3, 2, 16, wide=7, device=triton_device)
    law = ancestor_attention(q, k, v, keys.clone(), values.clone(), table, backend="reference")
    other = values.transpose(1, 2).contiguous().transpose(1, 2)
    operands = (q.contiguous(), k, v.transpose(1, 2).contiguous().transpose(1, 2), keys, other, table)
    before = keys.clone(), other.clone()
    assert_near(ancestor_attention(*operands, backend="triton"), law, 1e-5)
    assert_filed(operands, before)


def assert_quantised(low, law) -> None:
    same = low.data.view(torch.uint8) == law.data.view(torch.uint8)
    if low.data.is_cuda:  # tiles of another shape sum in another order, and may round to the neighbour
        assert same.float().mean() > 0.99
        torch.testing.assert_close(low.scale, law.scale, rtol=1e-2, atol=0)
    else:
        assert same.all()
        assert torch.equal(low.scale, law.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "d"), [(3, 16), (4, 24), (11, 128)])
@pytest.mark.parametrize("kind", ["e4m3:row", "e4m3:row:e8m0", "e4m3:1x128"])
def test_on_triton_quantised_result(triton_device, kind: str, heads: int, d: int, dtype: torch.dtype) -> None:
    """What quantising the plain result gives: to the byte, where sums are made in the same order."""
    operands = ancestry(2, 5, heads, 2, d, wide=7, dtype=dtype, device=triton_device)
    operands[2][0, 0] = 0
    plain = ancestor_attention(*copied(operands), backend="triton")
    before = operands[3].clone(), operands[4].clone()
    with poisoned_allocations():
        low = ancestor_attention(*operands, spec=Spec.parse(kind), backend="triton")
    assert_quantised(low, quantize(plain.reshape(10, heads * d), Spec.parse(kind)))
    assert_filed(operands, before)


def test_on_triton_compiles_to_one_graph(triton_device) -> None:
    registry.load("beam_attention")  # torch.compile cannot trace an import
    q, k, _, lengths = make(2, 5, 4, 2, 20, 16, device=triton_device)
    past = ancestry(2, 5, 4, 2, 16, wide=5, device=triton_device)

    spec = Spec.parse("e4m3:row")

    def both(q, k, lengths, own_k, own_v, keys, values, table):
        h = beam_attention(q, k, k, lengths, backend="triton")
        out = ancestor_attention(h, own_k, own_v, keys, values, table, backend="triton")
        low = ancestor_attention(out, own_k, own_v, keys, values, table, keep=False, spec=spec, backend="triton")
        return out, low.data.view(torch.uint8), low.scale

    compiled = torch.compile(both, fullgraph=True, dynamic=False, backend="aot_eager")
    first, second = copied(past), copied(past)
    for ours, law in zip(compiled(q, k, lengths, *first[1:]), both(q, k, lengths, *second[1:]), strict=True):
        torch.testing.assert_close(ours, law)
    assert torch.equal(first[3].nan_to_num(), second[3].nan_to_num())


@pytest.mark.parametrize("variant", ["11/11x128|shared", "11/11x128|shared|ragged", "8/2x128|ragged", "4/4x64"])
def test_a_variant_that_is_measured_is_the_one_that_was_named(variant: str) -> None:
    adapter = adapter_for("beam_attention")
    (call,) = adapter.calls([(2, 3, 8)], [variant])
    assert call.ragged == ("ragged" in variant)
    assert call.cache is None
    assert adapter.spell(call) == f"{variant}|bfloat16"


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
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_real_steps_on_a_gpu(steps: int) -> None:
    operands = ancestry(8, 512, 11, steps, 128, wide=512, dtype=torch.bfloat16, device="cuda")
    law = ancestor_attention(*copied(operands), backend="reference")
    before = operands[3].clone(), operands[4].clone()
    plain = ancestor_attention(*operands, backend="triton")
    assert_near(plain, law, TOLERANCE[torch.bfloat16])
    assert_filed(operands, before)
    spec = Spec.parse("e4m3:row")
    low = ancestor_attention(*operands, keep=False, spec=spec, backend="triton")
    assert_quantised(low, quantize(plain.reshape(8 * 512, 11 * 128), spec))


def test_on_triton_a_divided_context_does_not_depend_on_its_padding(triton_device) -> None:
    """Few rows: parts of a fixed size are joined in order, so the bits depend on the keys alone."""
    q, k, _, lengths = make(2, 1, 3, 1, 1100, 32, shared=True, lengths=[700, 515], device=triton_device)
    wide = beam_attention(q, k, k, lengths, backend="triton")
    narrow = beam_attention(q[1:], k[1:, :517], k[1:, :517], lengths[1:], backend="triton")
    assert torch.equal(wide[1:], narrow)
    assert_near(wide, beam_attention(q, k, k, lengths, backend="reference"), TOLERANCE[torch.float32])


@pytest.mark.gpu
def test_a_request_does_not_depend_on_its_neighbours_on_a_gpu() -> None:
    """Alone and in a batch: the same bits, which is what batch invariance is built on."""
    q, k, v, lengths = make(3, 200, 4, 4, 333, 128, dtype=torch.bfloat16, lengths=[100, 333, 64], device="cuda")
    together = beam_attention(q, k, v, lengths, backend="triton")
    for r in range(3):
        alone = beam_attention(q[r : r + 1], k[r : r + 1], v[r : r + 1], lengths[r : r + 1], backend="triton")
        assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("context", [48, 37])
@pytest.mark.parametrize("beams", [1, 70])
def test_on_triton_values_whose_tokens_were_transposed_together(triton_device, context: int, beams: int) -> None:
    """[G D, R S], as one transposing pass over all tokens leaves them. NaN behind a request's keys is not read."""
    requests, heads, d = 3, 2, 32
    q, k, _, lengths = make(requests, beams, heads, heads, context, d, dtype=torch.float16, lengths=[context, 33, 5], device=triton_device)  # fmt: skip
    low = k.to(torch.float8_e4m3fn)
    columns = torch.zeros(heads * d, -(-requests * context // 16) * 16, dtype=torch.uint8, device=triton_device)
    columns[:, : requests * context] = low.view(torch.uint8).reshape(-1, heads * d).T
    together = columns[:, : requests * context].view(torch.float8_e4m3fn).unflatten(1, (requests, context)).unflatten(0, (heads, d))  # fmt: skip
    v = together.permute(2, 3, 0, 1)
    assert torch.equal(v.view(torch.uint8), low.view(torch.uint8))
    out = beam_attention(q, low, v, lengths, scale=0.3, backend="triton")
    with poisoned_allocations():
        assert torch.equal(out, beam_attention(q, low, v, lengths, scale=0.3, backend="triton"))
    assert_near(out, beam_attention(q, low, low, lengths, scale=0.3, backend="reference"), 0.06)
    apart = low.clone().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert_near(out, beam_attention(q, low, apart, lengths, scale=0.3, backend="triton"), 2e-3)


@pytest.mark.parametrize(("requests", "context"), [(3, 48), (3, 37), (1, 37)])
def test_tma_reads_no_request_from_the_middle_of_16_bytes(requests: int, context: int) -> None:
    """Which is an illegal instruction on a GPU, and kills the process."""
    heads, d = 2, 32
    columns = torch.zeros(heads * d, -(-requests * context // 16) * 16, dtype=torch.uint8)[:, : requests * context]
    v = columns.view(torch.float8_e4m3fn).unflatten(1, (requests, context)).unflatten(0, (heads, d)).permute(2, 3, 0, 1)
    found = _columns_descriptor(v, 32)
    assert (found is None) == (requests > 1 and context % 16 > 0)
    x = torch.randn(requests, context, heads * d, dtype=torch.bfloat16)
    for values in (x, x.clone()):
        k, v = round_context(x, values, torch.ones(()), heads)
        for made in (k, v):
            assert made.shape == (requests, context if requests == 1 else 48, heads, d)
            assert torch.equal(
                made[:, :context].float(), x.to(torch.float8_e4m3fn).float().view(requests, context, heads, d)
            )
            assert not made[:, context:].float().any()
        if requests > 1:
            _, _, right = _columns_descriptor(v, 32)
            assert right == 48
