"""Every element of a product is compared: errors of any shape are found, rounding and hardware sums are not errors."""

from dataclasses import replace

import pytest
import torch

from loka.formats import Spec, decode
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import comparison
from loka.measure.adapter import parse_variant
from loka.measure.comparison import Product, compare_product
from loka.measure.conformance import law
from loka.measure.gate import allow
from loka.measure.inputs import matmul_operands
from loka.measure.stress import matmul_set

from .hopper import accumulate

SHAPE = (200, 96, 150)
ALLOWED = 3e-4


def make(variant: str = "e4m3:row@e4m3:row|float32") -> tuple[torch.Tensor, Product, torch.dtype]:
    call = parse_variant(variant, SHAPE)
    a, b = matmul_operands(call, distribution="lognormal_rows")
    return law(a, b).y, Product(a, b, keep=True), call.out_dtype


def test_the_exact_product_is_the_laws() -> None:
    call = parse_variant("e4m3:1x128@e4m3:128x128", SHAPE)
    a, b = matmul_operands(call)
    expected = law(a, b)
    ((start, exact),) = Product(a, b, keep=False).slabs()
    assert start == 0
    assert torch.allclose(exact.y, expected.y, rtol=1e-12, atol=1e-12)
    assert torch.allclose(exact.terms.double(), expected.terms, rtol=1e-5)


@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row|float32", "e4m3:1x32:e8m0@e4m3:1x32:e8m0|float32"])
@pytest.mark.parametrize("factor", [2.0**-118, 2.0**118])
def test_scales_that_make_up_for_one_another_hide_no_error(variant: str, factor: float) -> None:
    call = parse_variant(variant, SHAPE)
    a, b = matmul_operands(call)
    far = [replace(q, scale=q.scale * times) for q, times in ((a, factor), (b, 1 / factor))]
    (_, expected), (_, exact) = (next(Product(x, y, keep=False).slabs()) for x, y in ((a, b), far))
    assert torch.allclose(exact.terms, expected.terms, rtol=1e-5)
    right = exact.y.float()
    wrong = right.clone()
    wrong[3] *= 1.1
    product = Product(*far, keep=False)
    assert compare_product(right, product, allowed=ALLOWED, dtype=call.out_dtype)
    assert not compare_product(wrong, product, allowed=ALLOWED, dtype=call.out_dtype)


@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row", "e4m3:row@e4m3:row|float16", "e4m3:row@e4m3:row|float32"])
def test_one_rounding_is_no_error_and_two_roundings_down_are(variant: str) -> None:
    y, product, dtype = make(variant)
    found = compare_product(y.to(dtype), product, allowed=ALLOWED, dtype=dtype)
    assert found
    assert found.error < 1e-6
    if dtype == torch.bfloat16:
        cut = (y.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
        assert not compare_product(cut, product, allowed=ALLOWED, dtype=dtype)


@pytest.mark.parametrize(
    ("part", "factor", "where"),
    [
        ((slice(7, 8), slice(None)), 1.003, "row 7"),
        ((slice(None), slice(9, 10)), 1.003, "column 9"),
        ((slice(64, 72), slice(8, 16)), 1.003, "rows 64 to 71, columns 8 to 15"),
        ((slice(5, 6), slice(64, 128)), 1.003, "rows 5 to 5, columns 64 to 127"),
        ((slice(192, 200), slice(3, 4)), 1.01, "column"),
        ((slice(None), slice(None)), 1.001, ""),
    ],
)
def test_an_error_is_found_wherever_it_sits(part: tuple[slice, slice], factor: float, where: str) -> None:
    y, product, dtype = make()
    out = y.clone()
    out[part] *= factor
    found = compare_product(out.to(dtype), product, allowed=ALLOWED, dtype=dtype)
    assert not found
    assert where.split()[0] in found.reason if where else True


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    y, product, dtype = make()
    out = (y * (1 + 1e-4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))).to(dtype)
    whole = compare_product(out, product, allowed=ALLOWED, dtype=dtype)
    monkeypatch.setattr(comparison, "SLAB", 64 * 150)
    again = Product(product.a, product.b, keep=False)
    assert len(list(again.slabs())) == 4
    assert compare_product(out, again, allowed=ALLOWED, dtype=dtype).error == pytest.approx(whole.error, rel=0.1)
    out[199] *= 2
    assert "19" in compare_product(out, again, allowed=ALLOWED, dtype=dtype).reason


def test_what_is_not_finite_must_be_where_the_law_has_it() -> None:
    y, product, dtype = make()
    for value in (torch.nan, torch.inf):
        out = y.to(dtype)
        out[3, 4] = value
        assert "[3, 4]" in compare_product(out, product, allowed=ALLOWED, dtype=dtype).reason
    assert "expected" in compare_product(y[:5].to(dtype), product, allowed=ALLOWED, dtype=dtype).reason


def test_an_infinite_result_must_be_infinite() -> None:
    call = parse_variant("e5m2:row@e4m3:row", SHAPE)
    a, b = matmul_operands(call)
    elements = decode(a.data, a.spec.format)
    elements[7, 3] = torch.inf
    product = Product(replace(a, data=elements.to(a.data.dtype)), b, keep=False)
    ((_, exact),) = product.slabs()
    right = exact.y.to(call.out_dtype)
    assert right[7].isinf().any()
    wrong = torch.where(right.isinf(), 1.0, right)
    assert compare_product(right, product, allowed=ALLOWED, dtype=call.out_dtype)
    assert "overflow differently" in compare_product(wrong, product, allowed=ALLOWED, dtype=call.out_dtype).reason


def test_equal_rows_are_judged_by_elements_alone() -> None:
    y, product, dtype = make()
    out = (y + 2 * ALLOWED * torch.hypot(y, y)).to(dtype)  # an error many elements share, none too large
    assert not compare_product(out, product, allowed=ALLOWED, dtype=dtype)
    assert compare_product(out, product, allowed=ALLOWED, dtype=dtype, alike=True)


def test_hardware_sums_of_subnormals_are_no_error_and_flushing_them_is() -> None:
    """A subnormal is aligned as if it were the smallest normal, so what is added to it is cut off 8 times as early; cuBLAS was refused for that at 64 x 4096 x 4096."""
    spec = Spec.parse("e4m3:row")
    call = MatmulCall(384, 64, 384, spec, spec, torch.float32)
    allowed = allow(call)
    for seed in range(2):
        chosen = matmul_set(call, "extreme", seed=seed, device=torch.device("cpu"))
        scales = chosen.a.scale.double() * chosen.b.scale.double().T
        left, right = (decode(q.data, spec.format).double() for q in (chosen.a, chosen.b))
        product = Product(chosen.a, chosen.b, keep=True)
        found = compare_product((accumulate(left, right, 128) * scales).float(), product, allowed=allowed, dtype=torch.float32)  # fmt: skip
        assert found.error < 0.5 * allowed  # 0.7 where subnormals count as what they are
        flushed = torch.where(left.abs() < spec.format.smallest_normal, 0.0, left)
        assert not compare_product((flushed @ right.T * scales).float(), product, allowed=allowed, dtype=torch.float32)
