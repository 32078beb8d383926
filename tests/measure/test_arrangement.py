"""The same values in other places."""

import pytest
import torch

from loka.formats import Spec, quantize
from loka.measure.arrangement import Arrangement, choose_shift, unchanged


@pytest.mark.parametrize("place", ["fresh", "reused", "shifted", "slices"])
@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:tensor", "e4m3:1x128"])
def test_values_stay(place: str, spec: str) -> None:
    arrangement, q = Arrangement(), quantize(torch.randn(6, 200), Spec.parse(spec))
    for number in range(8):
        moved = arrangement.put_quantized(q, place, number, role="a")  # type: ignore[arg-type]
        assert unchanged(moved.data, q.data)
        assert torch.equal(moved.scale, q.scale)
        assert moved.data.data_ptr() != q.data.data_ptr()


def test_places_are_what_they_say() -> None:
    arrangement, x = Arrangement(), torch.randn(6, 20)
    first, second = (arrangement.put(x + i, "reused", i, role="x") for i in range(2))
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, x + 1)
    assert arrangement.put(x, "reused", 0, role="other").data_ptr() != first.data_ptr()
    assert arrangement.put(x, "shifted", 0, role="x").storage_offset() == 1
    assert arrangement.put(x, "shifted", 0, role="x").is_contiguous()
    assert not arrangement.put(x, "slices", 1, role="x").is_contiguous()
    assert arrangement.put(x[:0], "slices", 1, role="x").shape == (0, 20)
    assert {choose_shift(i) % 16 for i in range(16)} >= {0, 1, 2, 4, 8}


def test_bits_are_compared() -> None:
    x = torch.tensor([0.0, torch.nan])
    assert unchanged(x, x.clone())
    assert not unchanged(x, torch.tensor([-0.0, torch.nan]))
    assert not unchanged(x, x.double())
