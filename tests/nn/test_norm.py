import pytest
import torch
from torch import nn

from loka.nn import BlockNorm, make_norm
from loka.nn.norm import LayerNorm, RMSNorm


def rms_by_hand(row: list[float], block: int) -> list[float]:
    out: list[float] = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        scale = (sum(v * v for v in part) / len(part) + 1e-6) ** -0.5
        out += [v * scale for v in part]
    return out


@pytest.mark.parametrize("width", [1, 128, 255, 256, 257, 512, 600])
def test_blocknorm_normalises_each_block_over_its_own_width(width):
    torch.manual_seed(width)
    x = torch.randn(3, width, dtype=torch.float64) * 5
    expected = torch.tensor([rms_by_hand(row.tolist(), 256) for row in x], dtype=torch.float64)
    torch.testing.assert_close(BlockNorm(width)(x), expected, rtol=1e-12, atol=1e-12)


def test_blocknorm_over_d_never_mixes_two_vectors():
    x = torch.randn(2, 4, 128)
    y = BlockNorm(128)(x)
    changed = x.clone()
    changed[:, 1] *= 100
    torch.testing.assert_close(BlockNorm(128)(changed)[:, [0, 2, 3]], y[:, [0, 2, 3]], rtol=0, atol=0)


def test_blocknorm_output_is_bounded_by_sqrt_of_block_and_finite_for_zeros():
    x = torch.zeros(2, 512)
    x[0, 7] = 1e4
    y = BlockNorm(512)(x)
    assert y.abs().max() <= 16.0
    assert y[1].eq(0).all()


def test_blocknorm_has_no_parameters_and_refuses_other_widths():
    norm = BlockNorm(300)
    assert not norm.state_dict()
    with pytest.raises(ValueError, match="300"):
        norm(torch.zeros(2, 299))


def test_blocknorm_gradient():
    x = torch.randn(2, 300, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(BlockNorm(300, block=128), (x,))


@pytest.mark.parametrize("kind", ["layer", "rms", "block"])
def test_bf16_in_bf16_out_computed_in_float32(kind):
    torch.manual_seed(0)
    x = torch.randn(4, 512, dtype=torch.bfloat16) * 30
    norm = make_norm(kind, 512)
    exact = norm(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    out = norm.to(torch.bfloat16)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact.to(torch.bfloat16).float(), rtol=2**-7, atol=1e-6)


def test_make_norm_chooses_by_name():
    assert isinstance(make_norm("layer", 8), LayerNorm)
    assert make_norm("layer", 8, bias=False).bias is None
    assert isinstance(make_norm("rms", 8), RMSNorm)
    assert isinstance(make_norm("none", 8), nn.Identity)
    with pytest.raises(ValueError, match=r"batch.*layer"):
        make_norm("batch", 8)
