"""Every GEMM against float64 mathematics on the same quantised operands; the tolerance shown to be tight by breaking things."""

import math
import os

import pytest
import torch
from torch import Tensor

from formats.tables import TABLES
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.scaled_mm import MatmulCall, scaled_mm
from loka.measure.conformance import check_scaled_mm

PAIRS = [
    ("e4m3:tensor", "e4m3:tensor"),
    ("e4m3:row", "e4m3:row"),
    ("e4m3:row", "e4m3:tensor"),
    ("e5m2:row", "e4m3:row"),
    ("e4m3:1x128", "e4m3:128x128"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e4m3:row:pow2", "e4m3:row:pow2"),
    ("e4m3:col", "e4m3:2x3"),
    ("int8:row", "int8:row"),
    ("int4:1x32", "int8:tensor"),
    ("e2m1:1x32:e8m0", "e4m3:1x32:e8m0"),
    ("e2m1:1x16:e4m3", "e2m1:1x16:e4m3"),
]
SHAPES = [(1, 13, 27), (7, 479, 64), (64, 128, 256), (33, 300, 13), (1, 1, 1)]
every_backend = pytest.mark.parametrize("name", BACKENDS["scaled_mm"])
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "@".join(pair))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operands(shape: tuple[int, int, int], pair: tuple[str, str], device: torch.device) -> tuple[QTensor, QTensor]:
    """Zero-mean, with rows of different size, as activations and weights have them."""
    m, k, n = shape
    a = torch.randn(m, k) * torch.exp(torch.randn(m, 1))
    b = torch.randn(n, k) * torch.exp(torch.randn(n, 1))
    return quantize(a.to(device), Spec.parse(pair[0])), quantize(b.to(device), Spec.parse(pair[1]))


def values(q: QTensor) -> torch.Tensor:
    """In float64, by the tables and by repeating scales with a loop: nothing of loka's dequantise."""
    stored = q.data.cpu()
    codes = (stored.view(torch.uint8) if q.spec.format.has_nan else stored).numpy()
    result = torch.from_numpy(TABLES[q.spec.format.name].decode(codes))
    rows, cols = (
        total if extent == -1 else extent
        for total, extent in zip(q.shape, (q.spec.block.rows, q.spec.block.cols), strict=True)
    )
    scale = q.scale.cpu().double().reshape(-1, 1) if q.scale.dim() == 0 else q.scale.cpu().double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            result[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols] *= scale[i, j]
    return result if q.tensor_scale is None else result * q.tensor_scale.cpu().double()


def excess(out: torch.Tensor, a: QTensor, b: QTensor) -> float:
    """Worst error over what float32 may lose: K roundings of random sign on terms of this size, then one to the output's type."""
    left, right = values(a), values(b)
    exact, terms = left @ right.T, (left.square() @ right.square().T).sqrt()
    lost = (4 * math.sqrt(a.shape[1]) + 6) * 2.0**-24 * terms
    bound = lost + ROUNDING[out.dtype] * (exact.abs() + lost) + 2.0**-140
    return float(((out.cpu().double() - exact).abs() / bound).max()) if exact.numel() else 0.0


@every_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_float64_up_to_float32_rounding(pair, shape, dtype: torch.dtype, device) -> None:
    a, b = operands(shape, pair, device)
    out = scaled_mm(a, b, out_dtype=dtype, backend="reference")
    assert (out.shape, out.dtype) == ((shape[0], shape[2]), dtype)
    assert excess(out, a, b) <= 1


@every_pair
def test_the_bound_notices(pair: tuple[str, str]) -> None:
    """One scale off by a part in a thousand, one element changed, a result that went through bf16: each is outside it."""
    a, b = operands((33, 300, 13), pair, torch.device("cpu"))

    def perturbed(change) -> float:
        data, scale = a.data.clone(), a.scale.clone()
        change(data, scale)
        return excess(
            scaled_mm(QTensor(data, scale, a.spec, a.tensor_scale), b, out_dtype=torch.float32, backend="reference"),
            a,
            b,
        )

    assert perturbed(lambda data, scale: None) <= 1
    assert perturbed(lambda data, scale: scale.view(-1)[-1:].mul_(1.001)) > 1
    assert (
        perturbed(lambda data, scale: data[-1, -1:].copy_(torch.where(data[-1, -1:].float() == 1, 2, 1).to(data.dtype)))
        > 1
    )
    narrow = scaled_mm(a, b, out_dtype=torch.bfloat16, backend="reference").float()
    assert excess(narrow, a, b) > 1


def supported(name: str, calls: list[MatmulCall], device: torch.device) -> list[MatmulCall]:
    """The calls a backend takes here; a skip with its words where it takes none."""
    said = {call: registry.backend("scaled_mm", name).supports(call, device) for call in calls}
    if not any(said.values()):
        pytest.skip(f"{name}: {said[calls[0]].reason}")
    return [call for call, verdict in said.items() if verdict]


def pair_of(call: MatmulCall) -> tuple[str, str]:
    return str(call.a), str(call.b)


@every_backend
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_every_backend_conforms(name: str, fast: bool, device: torch.device) -> None:
    calls = [
        MatmulCall(*shape, Spec.parse(a), Spec.parse(b), dtype, fast)
        for a, b in PAIRS
        for shape in ([(1, 13, 27), (33, 300, 13)] if INTERPRETED else SHAPES)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    for call in supported(name, calls, device):
        a, b = operands((call.m, call.k, call.n), pair_of(call), device)
        conformance = check_scaled_mm(registry.backend("scaled_mm", name), call, a, b)
        assert conformance, f"{call}: {conformance.reason}"


@every_backend
@pytest.mark.parametrize("shape", [(0, 32, 16), (4, 0, 16), (4, 32, 0), (0, 0, 0)], ids=str)
def test_empty_operands(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    for call in supported(name, [MatmulCall(*shape, Spec.parse(a), Spec.parse(b)) for a, b in PAIRS], device):
        out = scaled_mm(*operands(shape, pair_of(call), device), out_dtype=torch.bfloat16, backend=name)
        assert (out.shape, out.dtype) == ((shape[0], shape[2]), torch.bfloat16)
        assert (out == 0).all()


@every_backend
@pytest.mark.parametrize(
    "pair",
    [("e4m3:row", "e4m3:row"), ("e5m2:1x128", "e4m3:128x128"), ("int8:row", "int8:row")],
    ids=lambda pair: "@".join(pair),
)
def test_nan_stays_in_its_row_and_zero_rows_are_zero(name: str, pair: tuple[str, str], device: torch.device) -> None:
    call = MatmulCall(6, 160, 32, Spec.parse(pair[0]), Spec.parse(pair[1]))
    supported(name, [call], device)
    if INTERPRETED and pair[0].startswith("e4m3"):
        pytest.skip("Triton's interpreter reads E4M3's NaN as the number 480")
    x = torch.randn(6, 160, device=device)
    x[2, 150], x[4] = math.nan, 0
    a = quantize(x, call.a)
    b = quantize(torch.randn(32, 160, device=device), call.b)
    out = scaled_mm(a, b, out_dtype=torch.bfloat16, backend=name)
    assert out.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert out[2].isnan().all()
    assert (out[4] == 0).all()


@pytest.mark.parametrize("shape", [(32, 64, 48), (7, 40, 24)])
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [
        (("e4m3:tensor", "e4m3:tensor"), torch.bfloat16),
        (("e4m3:tensor", "e4m3:tensor"), torch.float32),
        (("e4m3:row", "e4m3:tensor"), torch.float32),
        (("e4m3:row", "e4m3:row"), torch.float32),
    ],
    ids=str,
)
def test_what_packages_hold_is_the_same_product(shape: tuple[int, int, int], pair: tuple[str, str], dtype: torch.dtype, device: torch.device) -> None:  # fmt: skip
    """The op with an entry in C, which torch has on the CPU too; its operands as `prepare` lays them."""
    from loka.kernels.scaled_mm import torch as own

    a, b = operands(shape, pair, device)
    found = own.run_packaged(a, own.prepare(b, a.spec), out_dtype=dtype)
    expected = (values(a) @ values(b).T).float()
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < (
        2.0**-7 if dtype == torch.bfloat16 else 2.0**-11
    )


def test_a_package_takes_more_rows_than_it_has_columns(device: torch.device) -> None:
    from loka.kernels.scaled_mm import torch as own

    a, b = operands((4, 32, 16), ("e4m3:tensor", "e4m3:tensor"), device)
    weight = own.prepare(b, a.spec)

    class Product(torch.nn.Module):
        def forward(self, data: Tensor) -> Tensor:
            return own.run_packaged(QTensor(data, a.scale, a.spec), weight, out_dtype=torch.bfloat16)

    free = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Product(), (a.data,), dynamic_shapes=free, strict=False)
    assert program.module()(a.data.repeat(25, 1)).shape == (100, 16)


def test_infinity_is_not_hidden() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = -math.inf
    out = scaled_mm(
        quantize(x, Spec.parse("e5m2:row")),
        quantize(torch.ones(3, 4), Spec.parse("e4m3:row")),
        out_dtype=torch.bfloat16,
    )
    assert (out[1] == -math.inf).all()
    assert out[0].isfinite().all()


def test_autocast_does_not_narrow_the_reference() -> None:
    a, b = operands((7, 300, 13), ("e4m3:row", "e4m3:row"), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_mm(a, b, out_dtype=torch.float32, backend="reference")
    assert torch.equal(out, scaled_mm(a, b, out_dtype=torch.float32, backend="reference"))
    assert out.dtype == torch.float32


def test_operands_are_checked() -> None:
    a, b = operands((7, 30, 13), ("e4m3:row", "e4m3:row"), torch.device("cpu"))
    other = quantize(torch.ones(13, 31), Spec.parse("e4m3:row"))
    with pytest.raises(ValueError, match=r"scaled_mm takes a \[M, K\] and b \[N, K\], got \(7, 30\) and \(13, 31\)"):
        scaled_mm(a, other, out_dtype=torch.float32)
    cube = quantize(torch.ones(2, 13, 30), Spec.parse("e4m3:row"))
    with pytest.raises(ValueError, match=r"got \(7, 30\) and \(2, 13, 30\)"):
        scaled_mm(a, cube, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"scaled_mm writes .*, got torch\.int32"):
        scaled_mm(a, b, out_dtype=torch.int32)


def test_an_explicit_backend_that_cannot_run_raises_its_reason() -> None:
    a, b = operands((7, 30, 13), ("int8:row", "int8:row"), torch.device("cpu"))
    with pytest.raises(
        UnsupportedError, match=r"'triton' cannot run 7x30x13 int8:row @ int8:row -> float32 on cpu: multiplies e4m3"
    ):
        scaled_mm(a, b, out_dtype=torch.float32, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    """The same tests for the Triton backend, in a child process: the interpreter is chosen when Triton is imported."""
    run_interpreted(__file__)
