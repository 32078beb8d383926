import pytest
import torch

from loka.measure.adapter import parse_variant
from loka.measure.inputs import (
    DISTRIBUTIONS,
    draw,
    matmul_operands,
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
