"""Codecs: what they write they read, at the size they say; stochastic rounding is unbiased, exact on the grid, and repeatable."""

import math

import pytest
import torch

from loka.comms import parse_codec
from loka.formats import FORMATS, Draw, Spec, fake_quantize, quantize, round_to

SPELLINGS = [
    "fp32", "bf16", "fp16", "e4m3:1x128:pow2", "e4m3:1x32:e8m0", "e5m2:1x128:pow2", "e4m3:1x128", "int8:1x64", "int4:1x64", "e2m1:1x32:e8m0",
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("elements", [0, 1, 31, 128, 1000])
def test_decodes_to_the_law(spelling: str, elements: int) -> None:
    codec = parse_codec(spelling)
    assert str(codec) == spelling
    x = torch.randn(elements) * torch.logspace(-6, 4, elements or 1)[:elements]
    data = codec.encode(x)
    assert data.dtype == torch.uint8
    assert data.numel() == codec.size(elements)
    out = codec.decode(data, elements)
    if codec.spec is None:
        assert torch.equal(out, x.to(codec.dtype).float())
        return
    padded = torch.nn.functional.pad(x, (0, -elements % codec.block)).view(-1, codec.block)
    assert torch.equal(out, fake_quantize(padded, codec.spec).view(-1)[:elements])


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if ":" in s])
def test_whole_blocks_can_be_cut(spelling: str) -> None:
    codec = parse_codec(spelling)
    x = torch.randn(4 * codec.block)
    pieces = torch.cat([codec.encode(piece) for piece in x.split(codec.block)])
    assert torch.equal(pieces, codec.encode(x))


def test_bytes_an_element() -> None:
    for spelling in ("e4m3:1x128:pow2", "e4m3:1x32:e8m0", "e5m2:1x32:e8m0"):
        assert parse_codec(spelling).size(4096) / 4096 <= 1.04
        assert parse_codec(spelling).size(4096) / (4 * 4096) <= 0.27


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s != "fp32"])
def test_special_values_stay_visible_and_finite_ones_finite(spelling: str) -> None:
    codec = parse_codec(spelling)
    x = torch.zeros(256)
    x[3], x[130], x[131], x[200] = math.nan, math.inf, 1.0, 3.3e38
    out = codec.decode(codec.encode(x), 256)
    assert out[3].isnan()
    assert not out[130].isfinite()
    assert out[200].isfinite()


def test_weights_gathered_with_powers_of_two_are_not_rounded_twice() -> None:
    codec = parse_codec("e4m3:1x128:pow2")
    weight = torch.randn(64, 256)
    once = codec.decode(codec.encode(weight), weight.numel()).view_as(weight)
    assert torch.equal(codec.decode(codec.encode(once), once.numel()).view_as(once), once)
    again = quantize(once, Spec.parse("e4m3:128x128:pow2")).dequantize()
    changed = (again != once) & (once.abs() > once.abs().amax() * 2.0**-14)  # below it the coarser block underflows
    assert not bool(changed.any())
    planted = parse_codec("e4m3:1x128")  # a float32 scale would round again
    twice = quantize(planted.decode(planted.encode(weight), weight.numel()).view_as(weight), Spec.parse("e4m3:128x128"))
    assert not torch.equal(twice.dequantize(), planted.decode(planted.encode(weight), weight.numel()).view_as(weight))


@pytest.mark.parametrize("spelling", ["e4m3:1x128:pow2", "e5m2:1x128:pow2", "int8:1x128", "int4:1x128"])
@pytest.mark.parametrize(
    "value", [0.3137, 1.9e-3, 7.7e-6]
)  # normal, subnormal and below the smallest of E4M3 beside a 1
def test_stochastic_rounding_is_unbiased_within_four_sigma_over_a_million_draws(spelling: str, value: float) -> None:
    codec = parse_codec(f"{spelling}:stochastic")
    blocks = 7875
    x = torch.full((blocks, 128), value)
    x[:, 0] = 1.0  # the block's maximum
    out = codec.decode(codec.encode(x, draw=Draw(step=2, stream=1)), x.numel()).view_as(x)[:, 1:].double()
    assert out.numel() >= 1_000_000
    low, high = float(out.min()), float(out.max())
    assert low < high
    share = (float(torch.tensor(value).double()) - low) / (high - low)
    sigma = (high - low) * math.sqrt(share * (1 - share) / out.numel())
    assert abs(float(out.mean()) - float(torch.tensor(value).double())) < 4 * sigma


def test_twenty_random_bits_round_e4m3_without_bias() -> None:
    """The mean over all of them. A subnormal has more bits than are drawn: it may be too large by 2^-20 of a step."""
    noise = torch.arange(2**20) * 2.0**-20
    for value in (0.3137, -271.8281, 0.015625 + 2.0**-29, 3.1e-3, 7.7e-6, -1e-12):
        x = torch.full((2**20,), value)
        mean = round_to(x, FORMATS["e4m3"], rounding="stochastic", noise=noise).double().mean()
        excess = float(mean.abs() - x[0].double().abs())
        assert 0 <= excess < 2.0**-29, value
        assert excess == 0 or abs(value) < 0.015625, value


@pytest.mark.parametrize("spelling", ["e4m3:1x256:pow2", "e5m2:1x256:pow2", "e4m3:1x256:e8m0"])
def test_every_value_of_the_format_is_kept(spelling: str) -> None:
    """Subnormals included."""
    codec = parse_codec(f"{spelling}:stochastic")
    assert codec.spec is not None
    values = torch.arange(256, dtype=torch.uint8).view(codec.spec.format.dtype).float()
    values = torch.where(values.isfinite(), values, 0.0)
    for step in range(5):
        assert torch.equal(codec.decode(codec.encode(values, draw=Draw(step)), 256), values)


def test_numbers_depend_on_the_place_not_on_the_order() -> None:
    codec, x, draw = parse_codec("int8:1x64:stochastic"), torch.randn(8, 64), Draw(step=3, stream=2)
    whole = codec.encode(x, draw=draw).view(8, -1)
    assert torch.equal(codec.encode(x[5:], draw=draw, first_block=5).view(3, -1), whole[5:])
    assert not torch.equal(codec.encode(x, draw=Draw(step=4, stream=2)).view(8, -1), whole)
    plain, y = parse_codec("bf16:stochastic"), torch.randn(1000)
    assert torch.equal(plain.encode(y[300:], draw=draw, first_block=300), plain.encode(y, draw=draw)[600:])


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("e4m3:128x128", "1xN"), ("e4m3:tensor", "1xN"), ("e4m3:1x128:static", "static"), ("e2m1:1x16:e4m3", "two-level"),
        ("int4:1x33", "pairs"), ("fp32:stochastic", "bf16"), ("fp8", "FORMAT"),
    ],
)  # fmt: skip
def test_what_is_no_codec_says_why(spelling: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_codec(spelling)


def test_a_draw_goes_with_stochastic_rounding_and_with_nothing_else() -> None:
    with pytest.raises(ValueError, match="needs a draw"):
        parse_codec("e4m3:1x32:stochastic").encode(torch.ones(4))
    with pytest.raises(ValueError, match="takes no draw"):
        parse_codec("e4m3:1x32").encode(torch.ones(4), draw=Draw(0))
    with pytest.raises(ValueError, match="bytes"):
        parse_codec("e4m3:1x32").decode(torch.zeros(7, dtype=torch.uint8), 32)
