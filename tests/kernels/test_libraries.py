"""The library backends of scaled_mm: on a machine without a GPU, that they refuse with the true reason, prepare operands without changing a value,
and describe their outputs to torch.compile; with one, that they are right."""

from dataclasses import replace

import pytest
import torch
import torch._meta_registrations

from loka.formats import QTensor, Spec, scale_shape
from loka.kernels import registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.scaled_mm import cublaslt, deepgemm, fbgemm, layout, reference, torchao
from loka.kernels.scaled_mm import torch as library
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.adapter import parse_variant
from loka.measure.conformance import check_scaled_mm
from loka.measure.inputs import matmul_operands

LIBRARIES = {
    "torch": library,
    "deepgemm": deepgemm,
    "fbgemm": fbgemm,
    "torchao": torchao,
    "cublaslt": cublaslt,
}
SPECS = (
    "e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:128x128", "e5m2:row", "e4m3:col", "int8:row", "e4m3:1x32:e8m0",
    "e2m1:1x16:e4m3", "e4m3:row:pow2", "e4m3:64x64", "e5m2:tensor:delayed",
)  # fmt: skip
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = ((1, 13, 27), (7, 479, 64), (64, 128, 256), (33, 1024, 13))

on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled_mm on the CPU (2.11 has none, 2.13 has)",
)


def _pretend(monkeypatch: pytest.MonkeyPatch, capability: str, *, libraries: bool = False) -> None:
    """Answer as on a GPU of that capability."""
    monkeypatch.setattr(layout, "_capability", lambda index: capability)
    if libraries:
        monkeypatch.setattr(layout, "_import_failure", lambda module, extra: "")
        monkeypatch.setattr(cublaslt, "_missing", lambda: "")


def _call(variant: str, shape=(64, 256, 128)) -> MatmulCall:
    return parse_variant(variant, shape)


@pytest.mark.parametrize("name", LIBRARIES)
def test_they_are_registered(name: str) -> None:
    assert registry.backend("scaled_mm", name) is LIBRARIES[name]


@pytest.mark.parametrize("backend", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("device", [CPU, CUDA, torch.device("meta")], ids=str)
def test_supports_never_raises_and_always_explains_a_no(backend, device: torch.device) -> None:
    for a in SPECS:
        for b in SPECS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                verdict = backend.supports(MatmulCall(0, 0, 7, Spec.parse(a), Spec.parse(b), dtype), device)
                assert verdict.ok or verdict.reason
                if device.type != "cuda" or not torch.cuda.is_available():
                    assert not verdict.ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("backend", LIBRARIES.values(), ids=LIBRARIES)
def test_without_a_gpu_that_is_the_reason(backend) -> None:
    call = _call("e4m3:row@e4m3:row" if backend is cublaslt else "e4m3:1x128@e4m3:128x128")
    assert backend.supports(call, CPU).reason == "needs a CUDA GPU, not cpu"
    assert backend.supports(call, CUDA).reason == "needs a CUDA GPU, and this machine has none"
    with pytest.raises(UnsupportedError, match="CUDA GPU"):
        registry.pick("scaled_mm", next(n for n, b in LIBRARIES.items() if b is backend), call, CPU)


@pytest.mark.parametrize(
    ("capability", "variant", "yes"),
    [
        ("9 0", "e4m3:tensor@e4m3:tensor|fast", True),
        ("9 0", "e4m3:row@e4m3:tensor|float32", True),
        ("9 0", "e4m3:1x128@e4m3:128x128", True),
        ("9 0", "e4m3:128x128@e4m3:1x128", True),
        ("9 0", "e5m2:1x128@e4m3:1x128", True),
        ("9 0", "e4m3:128x128@e4m3:128x128", False),
        ("9 0", "e4m3:1x128@e4m3:row", False),
        ("9 0", "e5m2:row@e5m2:row", False),
        ("9 0", "int8:row@int8:row", False),
        ("9 0", "e4m3:1x32:e8m0@e4m3:1x32:e8m0", False),
        ("8 9", "e4m3:tensor@e4m3:tensor", True),
        ("8 9", "e4m3:1x128@e4m3:128x128", False),
        ("8 9", "e4m3:row@e4m3:row|float32", False),
        ("8 9", "e4m3:row@e4m3:row", True),
        ("10 0", "e4m3:1x128@e4m3:128x128", False),
        ("8 0", "e4m3:tensor@e4m3:tensor", False),
    ],
)
def test_torch_knows_what_its_library_has(monkeypatch, capability: str, variant: str, yes: bool) -> None:
    _pretend(monkeypatch, capability)
    verdict = library.supports(_call(variant), CUDA)
    assert verdict.ok == yes, verdict.reason


def test_an_old_gpu_is_named(monkeypatch) -> None:
    _pretend(monkeypatch, "8 0")
    assert (
        library.supports(_call("e4m3:row@e4m3:row"), CUDA).reason
        == "needs compute capability 8.9 or newer, this GPU has 8.0"
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [("deepgemm", "deep_gemm"), ("fbgemm", "fbgemm_gpu.experimental.gen_ai"), ("torchao", "torchao.kernel.blockwise_quantization")],
)  # fmt: skip
def test_a_missing_library_comes_with_its_install_line(monkeypatch, name: str, module: str) -> None:
    _pretend(monkeypatch, "9 0")
    monkeypatch.setattr(
        layout, "_import_failure", lambda m, extra: f"{m} is not here; install: pip install 'loka[{extra}]'"
    )
    reason = LIBRARIES[name].supports(_call("e4m3:1x128@e4m3:128x128"), CUDA).reason
    assert reason.startswith(f"{module} is not here; install: pip install 'loka[")


@pytest.mark.parametrize(
    ("name", "variant", "yes"),
    [
        ("deepgemm", "e4m3:1x128@e4m3:128x128", True),
        ("deepgemm", "e4m3:1x128@e4m3:128x128|float32", False),
        ("deepgemm", "e4m3:1x128@e4m3:1x128|float32", True),
        ("deepgemm", "e4m3:1x128@e4m3:1x128", False),
        ("deepgemm", "e4m3:row@e4m3:row", False),
        ("fbgemm", "e4m3:row@e4m3:row|fast", True),
        ("fbgemm", "e4m3:tensor@e4m3:tensor", True),
        ("fbgemm", "e4m3:1x128@e4m3:128x128", True),
        ("fbgemm", "e4m3:row@e4m3:row|float16", False),
        ("fbgemm", "e5m2:row@e4m3:row", False),
        ("torchao", "e4m3:1x128@e4m3:128x128", True),
        ("torchao", "e4m3:row@e4m3:row", False),
        ("cublaslt", "e4m3:row@e4m3:row|fast", True),
        ("cublaslt", "e5m2:tensor@e4m3:tensor|float32", True),
        ("cublaslt", "e5m2:row@e5m2:row", False),
        ("cublaslt", "e4m3:1x128@e4m3:128x128", False),
    ],
)
def test_libraries_know_what_they_have(monkeypatch, name: str, variant: str, yes: bool) -> None:
    _pretend(monkeypatch, "9 0", libraries=True)
    verdict = LIBRARIES[name].supports(_call(variant), CUDA)
    assert verdict.ok == yes, verdict.reason


def strided(q: QTensor) -> QTensor:
    """The same values in a non-contiguous tensor: rows inside a wider buffer, as a slice of a concatenation is."""
    rows, cols = q.data.shape
    wide = torch.zeros(rows, cols + 16, dtype=torch.uint8, device=q.device)
    wide[:, :cols] = q.data.contiguous().view(torch.uint8)
    return replace(q, data=wide[:, :cols].view(q.data.dtype))


@on_the_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "variant", ["e4m3:tensor@e4m3:tensor", "e4m3:row@e4m3:row", "e4m3:row@e4m3:tensor", "e4m3:tensor@e4m3:row"]
)
def test_torch_pads_invisibly(variant: str, shape: tuple[int, int, int]) -> None:
    """torch has an FP8 GEMM on the CPU too: enough to prove that padding and repeating scales change nothing."""
    call = _call(variant, shape)
    for operands in (matmul_operands(call), tuple(strided(q) for q in matmul_operands(call))):
        verdict = check_scaled_mm(library, call, *operands)
        assert verdict, verdict.reason
        assert library.run(*operands, out_dtype=torch.bfloat16).is_contiguous()


@pytest.mark.parametrize("backend", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("shape", [(0, 64, 16), (4, 64, 0), (4, 0, 16)])
def test_empty_operands_give_empty_or_zero(backend, shape: tuple[int, int, int]) -> None:
    a, b = matmul_operands(_call("e4m3:1x128@e4m3:128x128", shape))
    out = backend.run(a, b, out_dtype=torch.bfloat16)
    assert out.shape == (shape[0], shape[2])
    assert (out == 0).all()


@on_the_cpu
@pytest.mark.parametrize("variant", ["e4m3:tensor@e4m3:tensor", "e4m3:row@e4m3:row"])
def test_torch_compiles_without_a_graph_break(variant: str) -> None:
    a, b = matmul_operands(_call(variant, (5, 40, 13)))

    def gemm(x: torch.Tensor, scale_x: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
        assert library.supports(_call_of(x, w), CPU).reason  # part of what Linear traces
        return library.run(QTensor(x, scale_x, a.spec), QTensor(w, scale_w, b.spec), out_dtype=torch.bfloat16)

    def _call_of(x: torch.Tensor, w: torch.Tensor) -> MatmulCall:
        return MatmulCall(x.shape[0], x.shape[1], w.shape[0], a.spec, b.spec)

    compiled = torch.compile(gemm, fullgraph=True, backend="aot_eager")
    operands = (a.data, a.scale, b.data, b.scale)
    assert torch.equal(compiled(*operands), gemm(*operands))


@pytest.mark.parametrize("variant", ["e4m3:1x128@e4m3:128x128", "e4m3:128x128@e4m3:1x128", "e4m3:1x128@e4m3:1x128"])
@pytest.mark.parametrize("shape", [(1, 13, 27), (7, 479, 512), (64, 640, 384), (512, 4096, 1408)])
def test_torch_lays_block_scales_out_as_the_library_checks_them(
    monkeypatch, variant: str, shape: tuple[int, int, int]
) -> None:
    """torch's fake implementation checks shapes and strides of the scales as the GPU's does, once told it stands for one."""
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda tensor: "cuda")
    call = _call(variant, shape)
    plain = [_described(call.m, call.k, call.a), _described(call.n, call.k, call.b)]
    for operands in (plain, [_outer(q) if q.spec.block.rows == 1 else q for q in plain]):
        out = library.run(*operands, out_dtype=torch.bfloat16)
        assert (out.shape, out.dtype) == ((call.m, call.n), torch.bfloat16)
    x, scale = library._lay_out_blocks(plain[0])
    with pytest.raises(RuntimeError, match="blockwise scaling"):  # and it does check
        torch.nn.functional.scaled_mm(
            x, x.t(), scale, library.ScalingType.BlockWise1x128, scale[:1], library.ScalingType.BlockWise128x128
        )


def _described(rows: int, k: int, spec: Spec) -> QTensor:
    """A QTensor without values."""
    data = torch.empty(rows, k, dtype=spec.format.dtype, device="meta")
    return QTensor(data, torch.empty(scale_shape((rows, k), spec.block), device="meta"), spec)


def _outer(q: QTensor) -> QTensor:
    return QTensor(q.data, q.scale.t().contiguous().t(), q.spec)


@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        (deepgemm, "e4m3:1x128@e4m3:128x128"),
        (deepgemm, "e4m3:1x128@e4m3:1x128|float32"),
        (fbgemm, "e4m3:row@e4m3:row|fast"),
        (fbgemm, "e4m3:tensor@e4m3:tensor"),
        (fbgemm, "e4m3:1x128@e4m3:128x128"),
        (fbgemm, "e4m3:128x128@e4m3:128x128"),
        (torchao, "e4m3:1x128@e4m3:128x128"),
        (cublaslt, "e4m3:row@e4m3:tensor|fast"),
        (cublaslt, "e4m3:tensor@e4m3:tensor|float32"),
    ],
)
@pytest.mark.parametrize("shape", [(7, 479, 27), (64, 512, 256)])
def test_third_party_ops_describe_their_output(backend, variant: str, shape: tuple[int, int, int]) -> None:
    call = _call(variant, shape)
    operands = _described(call.m, call.k, call.a), _described(call.n, call.k, call.b)
    out = backend.run(*operands, out_dtype=call.out_dtype, fast_accum=call.fast_accum)
    assert (tuple(out.shape), out.dtype) == ((call.m, call.n), call.out_dtype)


def test_padding_adds_zeros_and_nothing_else() -> None:
    a, _ = matmul_operands(_call("e4m3:row@e4m3:row", (5, 13, 4)))
    padded = layout.aligned(a.data, 16, 32)
    assert padded.shape == (16, 32)
    assert torch.equal(padded[:5, :13].float(), a.data.float())
    assert padded.float().abs().sum() == a.data.float().abs().sum()
    assert layout.aligned(padded, 16, 32) is padded  # nothing to do, nothing copied


def test_misaligned_data_is_moved() -> None:
    buffer = torch.arange(40, dtype=torch.uint8).view(torch.float8_e4m3fn)
    off = buffer[8:40].view(2, 16)
    moved = layout.aligned(off, 2, 16)
    assert moved.storage_offset() == 0
    assert torch.equal(moved.view(torch.uint8), off.view(torch.uint8))


def test_scales_keep_their_values() -> None:
    a, _ = matmul_operands(_call("e4m3:1x128@e4m3:128x128", (5, 300, 4)))
    outer = layout.outer_major(a.scale, 16)
    assert (outer.shape, outer.stride()) == ((16, 3), (1, 16))
    assert torch.equal(outer[:5], a.scale)
    again = layout.outer_major(outer, 16)
    assert again.data_ptr() == outer.data_ptr()  # already in order: free
    tensor, _ = matmul_operands(_call("e4m3:tensor@e4m3:tensor", (5, 30, 4)))
    rows = layout.row_scales(tensor, 8)
    assert torch.equal(rows[:5], tensor.scale.expand(5, 1))
    assert (rows[5:] == 1).all()


def test_an_absent_library_is_asked_for_once(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(layout, "require_library", lambda module, extra: asked.append(module) or layout.no("absent"))
    layout._verdict.cache_clear()
    assert [layout.library("made_up", "x").reason for _ in range(3)] == ["absent"] * 3
    assert asked == ["made_up"]
    layout._verdict.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [*SHAPES, (512, 640, 384), (2048, 1024, 1024)])
def test_on_a_gpu_they_are_right(name: str, shape: tuple[int, int, int]) -> None:
    variants = (
        "e4m3:tensor@e4m3:tensor|fast",
        "e4m3:row@e4m3:row|fast",
        "e4m3:row@e4m3:tensor|float32",
        "e5m2:tensor@e4m3:tensor|float16",
        "e4m3:1x128@e4m3:128x128",
        "e4m3:1x128@e4m3:1x128|float32",
    )
    ran = 0
    for variant in variants:
        call = _call(variant, shape)
        if LIBRARIES[name].supports(call, CUDA):
            ran += 1
            verdict = check_scaled_mm(LIBRARIES[name], call, *matmul_operands(call, device="cuda"))
            assert verdict, f"{call}: {verdict.reason}"
    if not ran:
        pytest.skip(f"{name}: {LIBRARIES[name].supports(call, CUDA).reason}")


@on_the_cpu
def test_the_reference_is_what_they_are_held_to() -> None:
    call = _call("e4m3:row@e4m3:row")
    a, b = matmul_operands(call)
    assert torch.allclose(
        reference.run(a, b, out_dtype=torch.float32), library.run(a, b, out_dtype=torch.float32), rtol=1e-4, atol=1e-4
    )


def test_cublaslt_says_why_it_cannot_be_loaded(monkeypatch) -> None:
    _pretend(monkeypatch, "9 0")
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    cublaslt._library.cache_clear()
    try:
        reason = cublaslt.supports(_call("e4m3:row@e4m3:row"), CUDA).reason
    finally:
        cublaslt._library.cache_clear()
    assert reason.startswith("cuBLASLt cannot be loaded (libcublasLt.so.0")


@pytest.mark.gpu
def test_cublaslt_launches_the_product_alone_and_keeps_threads_apart() -> None:
    """One kernel a product, no memset; two threads with scales of their own do not mix them up."""
    from concurrent.futures import ThreadPoolExecutor

    a, b = matmul_operands(_call("e4m3:row@e4m3:row|fast", (4096, 1408, 1408)), device="cuda")
    expected = library.run(a, b, out_dtype=torch.bfloat16, fast_accum=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = cublaslt.run(a, b, out_dtype=torch.bfloat16, fast_accum=True)
        torch.cuda.synchronize()
    assert torch.equal(found, expected)
    names = [e.key for e in profile.key_averages() if e.self_device_time_total > 0]
    assert len(names) == 1, names

    def scaled(factor: float) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = replace(a, scale=a.scale * factor)
            ok = all(torch.equal(cublaslt.run(mine, b, out_dtype=torch.bfloat16, fast_accum=True), expected * factor) for _ in range(20))  # fmt: skip
            torch.cuda.current_stream().synchronize()
        return ok

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(scaled, (1.0, 2.0, 4.0, 8.0)))
