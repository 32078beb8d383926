import pytest
import torch

from loka.formats import Spec
from loka.kernels.quantize.call import QuantizeCall
from loka.measure.adapter import parse_variant
from loka.measure.inputs import (
    DISTRIBUTIONS,
    draw,
    matmul_operands,
    quantize_input,
)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_draws_are_functions_of_their_seed(distribution: str) -> None:
    first, again, other = (draw(12, 70, distribution=distribution, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))
    assert not torch.equal(first.nan_to_num(7.0), other.nan_to_num(7.0))


def test_distributions_are_what_they_say() -> None:
    rows = draw(300, 64, distribution="lognormal_rows").norm(dim=1)
    assert rows.max() / rows.min() > 100
    columns = draw(500, 128, distribution="outlier_channels").abs().amax(dim=0)
    assert (columns > 20).sum() == 2
    assert (draw(9, 8, distribution="zero_rows").abs().sum(dim=1) == 0).sum() == 3
    assert draw(9, 8, distribution="nan_row").isnan().sum() == 1
    assert draw(0, 8, distribution="nan_row").shape == (0, 8)
    uniform = draw(100, 100, distribution="uniform")
    assert uniform.abs().max() <= 1
    assert abs(float(uniform.mean())) < 0.05  # zero-mean: the gate's bound depends on it
    with pytest.raises(ValueError, match="no distribution"):
        draw(2, 2, distribution="cauchy")


@pytest.mark.parametrize(
    "variant", ["e4m3:1x128@e4m3:128x128", "e4m3:tensor:static@e5m2:row", "e4m3:128x128:pow2@e4m3:1x128"]
)
def test_operands_fit_their_call(variant: str) -> None:
    call = parse_variant(variant, (5, 300, 200))
    a, b = matmul_operands(call, distribution="outlier_channels")
    assert (a.shape, b.shape, a.spec, b.spec) == ((5, 300), (200, 300), call.a, call.b)
    assert a.dequantize().abs().max() > 10  # static scales fit the data too: nothing was clipped to nothing


def test_outer_major_scales_hold_the_same_values() -> None:
    call = parse_variant("e4m3:1x128@e4m3:128x128", (5, 300, 200))
    plain, outer = matmul_operands(call), matmul_operands(call, outer_major=True)
    assert torch.equal(plain[0].scale, outer[0].scale)
    assert (plain[0].scale.stride(), outer[0].scale.stride()) == ((3, 1), (1, 5))
    assert outer[1].scale.stride() == (3, 1)


def test_quantize_inputs_have_their_calls_type() -> None:
    x = quantize_input(QuantizeCall(3, 5, Spec.parse("e4m3:row"), torch.float16))
    assert (x.shape, x.dtype) == ((3, 5), torch.float16)
