"""The mixture of experts: the law against plain loops, every backend against the law, ragged and empty groups included.

Where there is no GPU the Triton tests need the interpreter, chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import UnsupportedError, registry
from loka.kernels.grouped_mm import (
    GroupedCall,
    MoveCall,
    SwigluCall,
    combine,
    deepgemm,
    gather,
    grouped_mm,
    grouped_swiglu,
    permute,
    swiglu_quantize,
)
from loka.measure.adapter import adapter_for
from loka.measure.conformance import poisoned_allocations
from loka.measure.rounding import judge_rounded

GROUP, SQUARE, ROW = Spec.parse("e4m3:1x128"), Spec.parse("e4m3:128x128"), Spec.parse("e4m3:row")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LOADS = {  # rows of each expert
    "ragged": [3, 0, 17, 1, 70],
    "one takes all": [0, 40, 0],
    "single": [9],
    "no rows": [0, 0],
}


def offsets_of(load: list[int], device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor([0, *load]).cumsum(0).to(torch.int32).to(device)


def operands(load: list[int], k: int, n: int, kind: str, device: torch.device = CPU, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(load), k, generator=g).to(device)
    w = (torch.randn(len(load), n, k, generator=g) * k**-0.5).to(device)
    if kind == "row":
        return quantize(x, ROW), quantize(w, ROW)
    if kind == "block":
        return quantize(x, GROUP), quantize(w, SQUARE)
    dtype = getattr(torch, kind)
    return x.to(dtype), w.to(dtype)


def values(t) -> torch.Tensor:
    return (t.dequantize() if isinstance(t, QTensor) else t).double()


def exact(x, w, load: list[int]) -> torch.Tensor:
    parts, start = [], 0
    for e, rows in enumerate(load):
        parts.append(values(x)[start : start + rows] @ values(w)[e].T)
        start += rows
    return torch.cat(parts)


def swiglu_of(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, 1)
    return F.silu(gate) * up


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "row", "block"])
@pytest.mark.parametrize("load", LOADS)
def test_reference_is_a_loop_over_experts(load: str, kind: str) -> None:
    x, w = operands(LOADS[load], 130, 48, kind)
    out = grouped_mm(x, w, offsets_of(LOADS[load]), out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(out.double(), exact(x, w, LOADS[load]), rtol=1e-4, atol=1e-5)


def test_reference_checks_the_offsets() -> None:
    x, w = operands([3, 2], 16, 16, "float32")
    for wrong in ([0, 3, 4], [0, 6, 5], [1, 3, 5]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the 5 rows"):
            grouped_mm(x, w, torch.tensor(wrong, dtype=torch.int32), out_dtype=torch.float32, backend="reference")


def test_mistakes_are_named() -> None:
    x, w = operands([3, 2], 16, 16, "float32")
    at = offsets_of([3, 2])
    with pytest.raises(ValueError, match=r"x \[M, K\] and w \[E, N, K\]"):
        grouped_mm(x, w[0], at, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"offsets must be int32 \[3\]"):
        grouped_mm(x, w, at.long(), out_dtype=torch.float32)
    with pytest.raises(ValueError, match="both QTensors or neither"):
        grouped_mm(quantize(x, ROW), w, at, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="one dtype"):
        grouped_mm(x, w.half(), at, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"h \[M, 2 F\]"):
        swiglu_quantize(torch.zeros(2, 5), None)
    with pytest.raises(ValueError, match="int32 or int64 ids"):
        permute(torch.zeros(2, 3), 4)
    p = permute(torch.zeros(2, 3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="6 visits, x has 5 tokens x 3"):
        gather(torch.zeros(5, 8), p)
    with pytest.raises(ValueError, match="add must be"):
        combine(torch.zeros(6, 8), p, torch.zeros(2, 3), add=torch.zeros(2, 9))


def test_every_refusal_says_why() -> None:
    def said(name: str, call, device=CUDA) -> str:
        return registry.backend("grouped_mm", name).supports(call, device).reason

    fp8 = {"in_dtype": torch.float8_e4m3fn}
    assert "multiples of 8" in said("torch", GroupedCall(4, 20, 16, 2))
    assert "row scales" in said("torch", GroupedCall(4, 128, 16, 2, GROUP, SQUARE, **fp8))
    assert "bfloat16 only" in said("torch", GroupedCall(4, 16, 16, 2, out_dtype=torch.float32))
    assert "grouped GEMM only" in said("torch", SwigluCall(4, 16, None))
    assert "no epilogue" in said("torch", GroupedCall(4, 16, 16, 2, swiglu=True))
    assert "not row x row" in said("deepgemm", GroupedCall(4, 128, 64, 2, ROW, ROW, **fp8))
    assert "multiple of 128" in said("deepgemm", GroupedCall(4, 100, 64, 2, GROUP, SQUARE, **fp8))
    assert "e4m3 only" in said("deepgemm", GroupedCall(4, 128, 64, 2))
    assert "row x row or" in said("triton", GroupedCall(4, 128, 64, 2, ROW, SQUARE, **fp8))
    assert "whole 128-wide blocks" in said("triton", GroupedCall(4, 128, 64, 2, GROUP, SQUARE, **fp8, swiglu=True))
    assert "quantizes to e4m3 under 1x128" in said("triton", GroupedCall(4, 16, 256, 2, swiglu=True, out=ROW))
    assert "up to 256 experts" in said("triton", MoveCall(4, 2, 300))
    assert "rounding to nearest" in said("triton", SwigluCall(4, 16, Spec.parse("e4m3:row:stochastic")))


def test_an_explicit_backend_that_cannot_run_raises() -> None:
    x, w = operands([3, 2], 16, 16, "float32")
    with pytest.raises(UnsupportedError, match="grouped_mm backend 'torch' cannot run 5x16x16 of 2 float32"):
        grouped_mm(x, w, offsets_of([3, 2]), out_dtype=torch.float32, backend="torch")


def ids_of(tokens: int, top: int, experts: int, device: torch.device = CPU) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=g).topk(top).indices.to(device)


def test_reference_permutation_is_a_stable_sort() -> None:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]])
    p = permute(ids, 5, backend="reference")
    assert p.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert p.offsets.tolist() == [0, 2, 2, 4, 6, 6]
    assert p.inverse.tolist() == [2, 0, 1, 4, 3, 5]
    assert p.tokens.tolist() == [0, 1, 0, 2, 1, 2]


def test_the_pieces_make_a_mixture() -> None:
    torch.manual_seed(1)
    ids, weights, x = ids_of(11, 2, 4), torch.rand(11, 2), torch.randn(11, 24)
    gate_up, down = torch.randn(4, 32, 24), torch.randn(4, 24, 16)
    p = permute(ids, 4)
    h = grouped_mm(gather(x, p), gate_up, p.offsets, out_dtype=torch.float32)
    y = grouped_mm(swiglu_quantize(h, None), down, p.offsets, out_dtype=torch.float32)
    out = combine(y, p, weights, add=x)
    expected = x.clone()
    for t in range(11):
        for j in range(2):
            e = ids[t, j]
            expected[t] += weights[t, j] * (down[e] @ swiglu_of((gate_up[e] @ x[t])[None])[0])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    fused = grouped_swiglu(gather(x, p), gate_up, p.offsets, spec=None, out_dtype=torch.float32)
    torch.testing.assert_close(fused, swiglu_quantize(h, None))


@pytest.mark.parametrize("spec", [ROW, GROUP])
def test_gathered_rows_bring_their_scales(spec: Spec) -> None:
    x = quantize(torch.randn(7, 200), spec)
    p = permute(ids_of(7, 3, 5), 5)
    rows = gather(x, p, backend="reference")
    torch.testing.assert_close(rows.dequantize(), x.dequantize()[p.tokens])
    with pytest.raises(ValueError, match="share scales with their neighbours"):
        gather(quantize(torch.randn(7, 200), SQUARE), p, backend="reference")


def test_deepgemm_spreads_groups_to_its_alignment() -> None:
    load = [3, 0, 130, 1]
    place, owner = deepgemm.spread(offsets_of(load), 134)
    assert owner.shape[0] % 128 == 0
    assert place[:3].tolist() == [0, 1, 2]
    assert place[3:133].tolist() == list(range(128, 258))
    assert place[133:].tolist() == [384]
    assert owner[place].tolist() == [0] * 3 + [2] * 130 + [3]
    assert (owner >= 0).sum() == 134


def test_deepgemm_calls_the_library_with_aligned_groups(monkeypatch) -> None:
    """The library replaced by a loop: what reaches it, and what is taken from it, is right."""
    import types

    def contiguous(a, b, out, owner) -> None:
        x = QTensor(a[0], a[1], GROUP).dequantize()
        w = QTensor(b[0], b[1], SQUARE).dequantize()
        for start in range(0, owner.shape[0], 128):  # it reads the expert of a tile's first row
            e = int(owner[start])
            if e >= 0:
                out[start : start + 128] = (x[start : start + 128] @ w[e].T).to(out.dtype)

    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=contiguous))
    load = [3, 0, 130, 1]
    x, w = operands(load, 256, 64, "block")
    out = deepgemm.run(x, w, offsets_of(load), out_dtype=torch.bfloat16)
    torch.testing.assert_close(out.double(), exact(x, w, load), rtol=1e-2, atol=1e-2)


def test_compiled_reference_is_one_graph() -> None:
    registry.load("grouped_mm")  # torch.compile cannot trace an import
    x, w = operands([3, 2], 16, 16, "float32")
    run = torch.compile(
        lambda x, w, at: grouped_mm(x, w, at, out_dtype=torch.float32, backend="reference"),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(run(x, w, offsets_of([3, 2])).double(), exact(x, w, [3, 2]), rtol=1e-4, atol=1e-5)


def triton_runs(device: torch.device) -> bool:
    return bool(registry.backend("grouped_mm", "triton").supports(MoveCall(1, 1, 1), device))


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


def assert_rows_near(out: torch.Tensor, law: torch.Tensor, tolerance: float) -> None:
    """Row by row: a wrong expert on one row drowns in the whole."""
    error = (out.double() - law).norm(dim=1) / law.norm(dim=1).clamp(min=1e-9)
    assert error.numel() == 0 or float(error.max()) < tolerance


TOLERANCE = {
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 8e-3,
    "row": 2e-3,
    "block": 2e-3,
}  # of float32 results; tensor cores keep 14 bits


@pytest.mark.parametrize("kind", ["float32", "float16", "row", "block"])
@pytest.mark.parametrize("load", LOADS)
def test_on_triton_same_as_the_law(triton_device, load: str, kind: str) -> None:
    x, w = operands(LOADS[load], 200, 136, kind, triton_device)
    at = offsets_of(LOADS[load], triton_device)
    law = exact(x, w, LOADS[load])
    for fast in (False, True) if kind == "row" else (False,):
        with poisoned_allocations():
            out = grouped_mm(x, w, at, out_dtype=torch.float32, fast_accum=fast, backend="triton")
        assert_rows_near(out, law, TOLERANCE[kind])
    if law.numel():
        with pytest.raises(AssertionError):
            assert_rows_near(out * (1 + 4 * TOLERANCE[kind]), law, TOLERANCE[kind])


@pytest.mark.parametrize("kind", ["float32", "row", "block"])
@pytest.mark.parametrize("spec", [None, GROUP])
def test_on_triton_fused_swiglu(triton_device, kind: str, spec: Spec | None) -> None:
    load = LOADS["ragged"]
    x, w = operands(load, 200, 2 * 256, kind, triton_device)
    at = offsets_of(load, triton_device)
    law = swiglu_of(exact(x, w, load))
    with poisoned_allocations():
        out = grouped_swiglu(x, w, at, spec=spec, out_dtype=torch.float32, backend="triton")
    if spec is None:
        assert_rows_near(out, law, TOLERANCE[kind])
    else:
        assert out.spec == spec
        slack = TOLERANCE[kind] * law.abs().amax(1, keepdim=True).expand_as(law)
        verdict = judge_rounded(out, law, slack)
        assert verdict, verdict.reason


def test_on_triton_fused_swiglu_of_nothing(triton_device) -> None:
    x, w = operands([0, 0], 128, 256, "block", triton_device)
    out = grouped_swiglu(x, w, offsets_of([0, 0], triton_device), spec=GROUP, backend="triton")
    assert out.shape == (0, 128)


@pytest.mark.parametrize("spec", [None, ROW, GROUP, Spec.parse("e4m3:1x128:pow2")], ids=str)
@pytest.mark.parametrize("shape", [(37, 200), (1, 16), (0, 32)])
def test_on_triton_swiglu(triton_device, spec: Spec | None, shape: tuple[int, int]) -> None:
    h = torch.randn(shape[0], 2 * shape[1], device=triton_device)
    if shape[0] > 3:
        h[1] = 0
        h[3, 0] = float("nan")
    with poisoned_allocations():
        out = swiglu_quantize(h, spec, backend="triton")
    law = swiglu_of(h.double())
    if spec is None:
        torch.testing.assert_close(out.double(), law, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        verdict = judge_rounded(
            out, law, 1e-5 * law.nan_to_num(0.0).abs().amax(1, keepdim=True).expand_as(law) if law.numel() else law
        )
        assert verdict, verdict.reason


@pytest.mark.parametrize(("tokens", "top", "experts"), [(1, 1, 1), (50, 3, 5), (100, 2, 53), (3, 3, 256), (0, 2, 4)])
def test_on_triton_permutation(triton_device, tokens: int, top: int, experts: int) -> None:
    ids = ids_of(tokens, top, experts, triton_device)
    ids = torch.where(ids == experts - 1, 0, ids)  # one takes more, one is idle
    for dtype in (torch.int64, torch.int32):
        with poisoned_allocations():
            ours = permute(ids.to(dtype), experts, backend="triton")
        law = permute(ids, experts, backend="reference")
        for name in ("order", "offsets", "inverse"):
            assert torch.equal(getattr(ours, name), getattr(law, name)), name
            assert getattr(ours, name).dtype == getattr(law, name).dtype


@pytest.mark.parametrize("width", [200, 70, 7])
def test_on_triton_gather_and_combine(triton_device, width: int) -> None:
    x = torch.randn(40, width, device=triton_device)
    p = permute(ids_of(40, 3, 5, triton_device), 5, backend="reference")
    for source in (x, x.half(), quantize(x, ROW), quantize(x, GROUP), quantize(x, Spec.parse("e4m3:tensor"))):
        ours, law = (gather(source, p, backend=name) for name in ("triton", "reference"))
        assert torch.equal(values(ours), values(law))
    y, weights = torch.randn(120, width, device=triton_device), torch.rand(40, 3, device=triton_device)
    for add in (None, torch.randn(40, width, device=triton_device)):
        ours, law = (combine(y, p, weights, add=add, backend=name) for name in ("triton", "reference"))
        torch.testing.assert_close(ours, law, rtol=1e-5, atol=1e-5)


def test_on_triton_nothing_leaks_between_experts(triton_device) -> None:
    """NaN in a neighbour's rows or weights must stay there."""
    load = [5, 4, 6]
    x, w = operands(load, 64, 32, "float32", triton_device)
    x[5:9], w[1] = float("nan"), float("nan")
    out = grouped_mm(x, w, offsets_of(load, triton_device), out_dtype=torch.float32, backend="triton")
    assert out[:5].isfinite().all()
    assert out[9:].isfinite().all()
    assert out[5:9].isnan().all()


def test_on_triton_operands_that_start_anywhere(triton_device) -> None:
    """Slices of larger buffers, as an engine's static memory hands them out: TMA wants multiples of 16 bytes."""
    load = [5, 4]
    x, w = operands(load, 64, 32, "float32", triton_device)
    shifted_x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    shifted_w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
    out = grouped_mm(shifted_x, shifted_w, offsets_of(load, triton_device), out_dtype=torch.float32, backend="triton")
    assert_rows_near(out, exact(x, w, load), TOLERANCE["float32"])


def test_on_triton_compiles_to_one_graph(triton_device) -> None:
    ids = ids_of(20, 2, 3, triton_device)
    weights, x = torch.rand(20, 2, device=triton_device), torch.randn(20, 128, device=triton_device)
    gate_up = quantize(torch.randn(3, 256, 128, device=triton_device), SQUARE)
    down = quantize(torch.randn(3, 128, 128, device=triton_device), SQUARE)
    rows = quantize(x, GROUP)

    def layer(data, scale, ids, weights, u, su, d, sd):
        p = permute(ids, 3, backend="triton")
        rows = gather(QTensor(data, scale, GROUP), p, backend="triton")
        a = grouped_swiglu(rows, QTensor(u, su, SQUARE), p.offsets, spec=GROUP, backend="triton")
        y = grouped_mm(a, QTensor(d, sd, SQUARE), p.offsets, out_dtype=torch.float32, backend="triton")
        return combine(y, p, weights, backend="triton")

    arguments = (rows.data, rows.scale, ids, weights, gate_up.data, gate_up.scale, down.data, down.scale)
    registry.load("grouped_mm")
    from loka.kernels.grouped_mm import triton_ops  # noqa: F401  (torch.compile cannot trace an import)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "variant", ["bfloat16|53", "e4m3:row@e4m3:row|53", "e4m3:row@e4m3:row|53|fast", "e4m3:1x128@e4m3:128x128|53"]
)
@pytest.mark.parametrize("rows", [1, 53, 1531, 6784])
def test_every_backend_conforms_on_a_gpu(variant: str, rows: int) -> None:
    adapter = adapter_for("grouped_mm")
    (call,) = adapter.calls([(rows, 1408, 2816)], [variant])
    ran = 0
    for name, backend in ((name, registry.backend("grouped_mm", name)) for name in registry.BACKENDS["grouped_mm"]):
        if name in ("reference", "deepgemm") or not backend.supports(call, CUDA):
            continue
        operands = adapter.operands(call, seed=3, distribution="outlier_channels", device=CUDA)
        verdict = adapter.check(backend, call, operands)
        assert verdict, f"{name}: {verdict.reason}"
        ran += 1
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "row", "block"])
def test_fused_swiglu_on_a_gpu(kind: str) -> None:
    load = [0, 130, 1, 0, 700, 64, 63]
    x, w = operands(load, 1408, 2816, kind, CUDA)
    law = swiglu_of(exact(x, w, load))
    out = grouped_swiglu(x, w, offsets_of(load, CUDA), spec=GROUP, backend="triton")
    verdict = judge_rounded(out, law, 4e-3 * law.abs().amax(1, keepdim=True).expand_as(law))
    assert verdict, verdict.reason


@pytest.mark.gpu
def test_captured_on_a_gpu() -> None:
    """Group sizes are data: a graph captured with one load replays with another."""
    x, w = operands([100, 28], 256, 256, "block", CUDA)
    at = offsets_of([100, 28], CUDA)
    grouped_mm(x, w, at, out_dtype=torch.float32, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mm(x, w, at, out_dtype=torch.float32, backend="triton")
    for load in ([100, 28], [0, 128], [65, 63]):
        at.copy_(offsets_of(load, CUDA))
        graph.replay()
        assert_rows_near(out, exact(x, w, load), 2e-3)
