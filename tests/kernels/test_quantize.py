"""Every quantiser against the law, bit for bit: scales, elements, transposes, on hard inputs. The law itself against float64."""

import math
import os

import pytest
import torch

from formats.tables import TABLES
from kernels.interpreter import run_interpreted
from loka.formats import FORMATS, QTensor, Spec, decode, expand_scale, scale_shape
from loka.formats import quantize as quantize_by_law
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.quantize import QuantizeCall, quantize, quantize_both, quantize_transposed, transpose

SPECS = [
    *[f"{f}:{b}" for f in ("e4m3", "e5m2") for b in ("tensor", "row", "1x128", "128x128")],
    "e4m3:tensor:pow2",
    "e4m3:row:pow2",
    "e5m2:1x128:pow2",
    "e4m3:128x128:pow2",
    "e4m3:col",
    "e4m3:1x32:e8m0",
    "int8:row",
    "int4:1x32",
    "e2m1:1x32:e8m0",
    "e2m1:1x16:e4m3",
]
every_backend = pytest.mark.parametrize("name", BACKENDS["quantize"])
every_spec = pytest.mark.parametrize("spec", [Spec.parse(s) for s in SPECS], ids=str)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(1, 1), (1, 13), (5, 129), (130, 130) if INTERPRETED else (130, 261), (0, 7), (7, 0)]


def hard(m: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of very different size, a zero row, tiny and huge values, NaN and both infinities."""
    x = torch.randn(m, k) * torch.exp(2 * torch.randn(m, 1))
    if m > 2 and k > 4:
        x[1] = 0
        x[2, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e-42])
        x[-1] *= 1e-30 if dtype != torch.float16 else 1e-6
        x[-2, -1] = 3e38 if dtype != torch.float16 else 6e4
    return x.to(dtype).to(device)


def supported(name: str, calls: list[QuantizeCall], device: torch.device) -> list[QuantizeCall]:
    """The calls a backend takes here; a skip with its words where it takes none."""
    said = {call: registry.backend("quantize", name).supports(call, device) for call in calls}
    if not any(said.values()):
        pytest.skip(f"{name}: {said[calls[0]].reason}")
    return [call for call, verdict in said.items() if verdict]


def assert_same(q: QTensor, law: QTensor) -> None:
    """The same values everywhere; a NaN may have any payload, a zero any sign."""
    assert (q.spec, q.shape, q.data.dtype) == (law.spec, law.shape, law.data.dtype)
    assert q.scale.shape == law.scale.shape, str(q.spec)
    assert torch.equal(q.scale.nan_to_num(-1), law.scale.nan_to_num(-1))
    assert (q.tensor_scale is None) == (law.tensor_scale is None)
    elements, expected = decode(q.data, q.spec.format), decode(law.data, law.spec.format)
    assert torch.equal(elements.isnan(), expected.isnan())
    assert torch.equal(elements.nan_to_num(7.0, torch.inf, -torch.inf), expected.nan_to_num(7.0, torch.inf, -torch.inf))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_law(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for call in supported(name, [QuantizeCall(5, 129, Spec.parse(s), dtype) for s in SPECS], device):
        for shape in SHAPES:
            x = hard(*shape, dtype, device)
            before = x.clone()
            assert_same(quantize(x, call.spec, backend=name), quantize_by_law(x, call.spec))
            assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))  # functional: the input is not touched


@every_backend
@pytest.mark.parametrize("other", ["same", "e5m2:row", "e4m3:1x128", "e4m3:tensor", "e4m3:128x128:pow2"])
def test_the_transpose_is_quantised_from_the_original(name: str, other: str, device: torch.device) -> None:
    specs = [Spec.parse(s) for s in SPECS]
    calls = [QuantizeCall(5, 129, s, torch.bfloat16, s if other == "same" else Spec.parse(other)) for s in specs]
    for call in supported(name, calls, device):
        for shape in [(1, 13), (5, 130) if INTERPRETED else (130, 261), (0, 7), (7, 0)]:
            x = hard(*shape, torch.bfloat16, device)
            q, t = quantize_both(x, call.spec, call.transpose, backend=name)
            assert_same(q, quantize_by_law(x, call.spec))
            assert_same(t, quantize_by_law(x.T.contiguous(), call.transpose))
            assert t.data.stride(1) == 1  # K-major, as the GEMM wants it; rows may be padded
            assert_same(quantize_transposed(x, call.transpose, backend=name), t)


@every_backend
@pytest.mark.parametrize("spec", [Spec.parse(s) for s in ("e4m3:row", "e4m3:tensor", "e4m3:1x128")], ids=str)
def test_strides_do_not_matter(name: str, spec: Spec, device: torch.device) -> None:
    supported(name, [QuantizeCall(9, 40, spec, torch.float32)], device)
    x = hard(40, 9, torch.float32, device)
    for view in (x.T, x.T[:, ::2], x.T[1:, 3:], x[:1, :1].expand(5, 7)):
        assert_same(quantize(view, spec, backend=name), quantize_by_law(view.contiguous(), spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [12, 9])
def test_triton_maxima_of_more_chunks_than_programs(dtype: torch.dtype, width: int, device: torch.device) -> None:
    """Programs go round again: every row counts, the last ones too, in pairs of columns or one by one."""
    spec, row = Spec.parse("e4m3:tensor"), Spec.parse("e4m3:row")
    supported("triton", [QuantizeCall(450, width, spec, dtype)], device)
    for at in (0, 289, 449):
        x = torch.ones(450, width, device=device, dtype=dtype)
        x[at, at % width], x[at - 1, 0] = -7, math.inf
        q, q_t = quantize_both(x, row, row, backend="triton")
        assert_same(q, quantize_by_law(x, row))
        assert_same(q_t, quantize_by_law(x.T.contiguous(), row))
        assert_same(quantize(x, spec, backend="triton"), quantize_by_law(x, spec))


@every_backend
@pytest.mark.parametrize(
    "text", ["e4m3:tensor:static", "e5m2:tensor:delayed", "e4m3:row:static", "e4m3:row:static:pow2"]
)
def test_given_scales_are_used(name: str, text: str, device: torch.device) -> None:
    spec = Spec.parse(text)
    supported(name, [QuantizeCall(5, 129, spec, torch.float32)], device)
    x = hard(5, 129, torch.float32, device)
    scale = torch.full(scale_shape(x.shape, spec.block), 0.25, device=device)
    assert_same(quantize(x, spec, scale=scale, backend=name), quantize_by_law(x, spec, scale=scale))
    with pytest.raises(ValueError, match="needs a scale: its scales do not come from x"):
        quantize(x, spec, backend=name)
    dynamic = Spec(spec.format, spec.block)
    with pytest.raises(ValueError, match="computes its scale from x"):
        quantize(x, dynamic, scale=scale, backend=name)
    with pytest.raises(ValueError, match=r"needs scales of .*, got \(3, 3\)"):
        quantize(x, spec, scale=torch.ones(3, 3, device=device), backend=name)


@every_backend
@pytest.mark.parametrize(
    "text", ["e4m3:row:stochastic", "e5m2:1x128:stochastic", "e4m3:tensor:stochastic", "int8:row:stochastic"]
)
def test_stochastic_rounding(name: str, text: str, device: torch.device) -> None:
    """Lands on the two neighbours, is unbiased, follows its generator, leaves the grid alone."""
    spec = Spec.parse(text)
    supported(name, [QuantizeCall(64, 256, spec, torch.float32)], device)
    x = torch.randn(64, 256, device=device)
    nearest = Spec(spec.format, spec.block)

    def draw(seed: int) -> QTensor:
        return quantize(x, spec, backend=name, generator=torch.Generator(device).manual_seed(seed))

    assert torch.equal(draw(1).data.float(), draw(1).data.float())
    assert not torch.equal(draw(1).data.float(), draw(2).data.float())
    q = draw(1)
    assert torch.equal(q.scale, quantize_by_law(x, nearest).scale)
    scaled = (x * expand_scale(1 / q.scale, x.shape, spec.block)).cpu().numpy()
    low, high = (torch.from_numpy(v) for v in TABLES[spec.format.name].neighbours(scaled))
    drawn = q.data.cpu().double()
    assert ((drawn == low) | (drawn == high)).all()
    between = high > low
    chance = ((torch.from_numpy(scaled) - low) / (high - low))[between]
    up = (drawn == high)[between].double()
    assert abs((up - chance).sum()) < 5 * (chance * (1 - chance)).sum().sqrt()
    on_grid = quantize_by_law(x, nearest).dequantize()
    again = quantize(
        on_grid, Spec(spec.format, spec.block, "f32", "static", "stochastic"), scale=q.scale, backend="reference"
    )
    assert torch.equal(again.data.float(), quantize_by_law(x, nearest).data.float())


def test_the_bias_bound_notices_rounding_to_nearest() -> None:
    x = torch.randn(64, 256).abs() * 0.3 + 8.2  # E4M3 steps by 1: mostly nearer to the lower neighbour
    up = (x.round() > x).double()
    chance = x.double() - x.floor()
    assert abs((up - chance).sum()) > 5 * (chance * (1 - chance)).sum().sqrt()


@every_spec
def test_the_reference_is_right_in_float64(spec: Spec) -> None:
    """Against the definition, not against the same code: amax / max, and the nearest code of x / scale."""
    x = torch.randn(130, 261) * torch.exp(2 * torch.randn(130, 1))
    q = quantize(x, spec, backend="reference")
    scale = expand_scale(q.scale, x.shape, spec.block).double() * (
        1.0 if q.tensor_scale is None else q.tensor_scale.double()
    )
    table = torch.from_numpy(TABLES[spec.format.name].values)
    ratio = x.double().abs() / scale
    upper = torch.searchsorted(table, ratio).clamp(1, len(table) - 1)
    best = torch.minimum((ratio - table[upper]).abs(), (ratio - table[upper - 1]).abs())
    error = (q.dequantize().double() - x).abs() / scale
    assert (error <= best + 2**-21 * ratio.clamp(max=float(table[-1]))).all()
    worse = (q.dequantize().double() - x * (1 + 2**-10)).abs() / scale
    assert not (worse <= best + 2**-21 * ratio.clamp(max=float(table[-1]))).all()  # a relative shift of 0.1 % is seen
    if spec.scale == "f32":
        largest = scale * FORMATS[spec.format.name].max
        assert (x.abs() <= largest * (1 + 2**-22)).all()
        assert ((x.abs() >= largest * (1 - 2**-22)).sum() >= q.scale.numel()).all()  # and some element reaches it


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2-D"):
        quantize(torch.ones(shape), Spec.parse("e4m3:row"))


def test_what_nobody_can_do_on_a_named_backend_raises() -> None:
    with pytest.raises(UnsupportedError, match="cannot run 4x32 float32 -> e2m1:1x16:e4m3 on cpu"):
        quantize(torch.ones(4, 32), Spec.parse("e2m1:1x16:e4m3"), backend="triton")


@pytest.mark.parametrize("name", BACKENDS["quantize"])
def test_compiles_without_a_graph_break(name: str, device: torch.device) -> None:
    spec = Spec.parse("e4m3:row")
    supported(name, [QuantizeCall(9, 40, spec, torch.float32)], device)
    registry.load("quantize")

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * quantize(x, spec, backend=name).dequantize()

    x = hard(9, 40, torch.float32, device)
    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x).nan_to_num(), double(x).nan_to_num())


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(
        __file__, "triton and (float32 or same or given or strides or stochastic or compiles or transpose_moves)"
    )


@pytest.mark.parametrize(("spec", "shape"), [("e4m3:row:static", (3, 1)), ("e4m3:tensor:static", (1,))])
def test_triton_refuses_a_scale_of_another_shape_before_reading_it(spec: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs scales of"):
        registry.backend("quantize", "triton").run(torch.ones(4, 32), Spec.parse(spec), scale=torch.ones(shape))


@pytest.mark.parametrize("name", BACKENDS["quantize"])
@pytest.mark.parametrize("shape", [(5, 70), (130, 27), (1, 1), (64, 256)])
def test_transpose_moves_the_bytes(name: str, shape: tuple[int, int], device: torch.device) -> None:
    spec = Spec.parse("e4m3:tensor")
    q = quantize(torch.randn(shape, device=device), spec, backend="reference")
    verdict = registry.backend("quantize", name).supports(QuantizeCall(*shape, spec), device)
    if not verdict:
        pytest.skip(verdict.reason)
    turned = transpose(q, backend=name)
    assert turned.data.stride(1) == 1
    assert torch.equal(turned.data.view(torch.uint8), q.data.view(torch.uint8).T)
    with pytest.raises(ValueError, match="which the transpose cannot reuse"):
        transpose(quantize(torch.randn(shape, device=device), Spec.parse("e4m3:row"), backend="reference"))
