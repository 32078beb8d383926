"""Bytes for the wire: the kernels write and read what the codec's torch operations do."""

import math

import pytest
import torch

from kernels.interpreter import NOT_RUN, run_interpreted
from loka.formats import Draw, Spec, block_bits
from loka.kernels import wire
from loka.kernels.wire.codec import Codec, parse_codec

WHOLE = 1055  # 8 blocks of 128 and 32 of 32, and a last one that is cut short
# four blocks with scales of one byte share words: 1 to 4 of them, and beyond a program's tile
BLOCKS = [
    ("e4m3:1x128:pow2", WHOLE), ("e4m3:1x128", WHOLE), ("e4m3:1x16:pow2", 100), ("e4m3:1x1024:pow2", 1024), ("e5m2:1x128", WHOLE),
    ("e4m3:1x32:e8m0", 32), ("e4m3:1x32:e8m0", 64), ("e4m3:1x32:e8m0", 96), ("e4m3:1x32:e8m0", 2304 + 31), ("e5m2:1x32:e8m0", WHOLE),
    ("e4m3:1x16:e8m0", 333), ("e5m2:1x64:e8m0", WHOLE), ("e4m3:1x1024:e8m0", 5120),
]  # fmt: skip
DRAWN = [("e4m3:1x128:pow2", WHOLE), ("e4m3:1x128", WHOLE), ("e4m3:1x32:e8m0", 2304 + 31), ("e4m3:1x16:pow2", 100), ("e4m3:1x1024:pow2", 1024)]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def hard(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over eighteen powers of ten, subnormals of E4M3 and of float32, zeros of both signs, all that is no number."""
    generator = torch.Generator().manual_seed(elements)
    x = torch.randn(elements, generator=generator) * torch.logspace(-12, 6, elements)
    x = x[torch.randperm(elements, generator=generator)]
    x[5::97], x[7::31], x[11::89], x[13::203] = 0.0, -0.0, 1e-30, -1e-42
    x[17::101], x[19::211], x[23::307], x[29::401] = math.nan, math.inf, -math.inf, -math.nan
    x[300:556] *= 2.0**-110  # scales at their least, and a block of zeros
    x[640:800] = 0
    return x.to(dtype)


def require_kernels(codec: Codec, dtype: torch.dtype) -> None:
    verdict = wire.supports(codec.spec, dtype, torch.device("cpu"))
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")


@pytest.mark.parametrize(("spelling", "elements"), BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_writes_and_reads_the_law(spelling: str, elements: int, dtype: torch.dtype) -> None:
    codec = parse_codec(spelling)
    require_kernels(codec, dtype)
    x = hard(elements, dtype)
    law = codec._encode_blocks(x, None, 0)
    assert torch.equal(codec.encode(x), law)
    if spelling.startswith("e5m2"):  # the interpreter reads its NaN as a number
        law = codec._encode_blocks(x.nan_to_num(), None, 0)
    read = torch.float32 if codec.spec.scale == "f32" else dtype  # the interpreter cuts off what bf16 has no bits for
    values = codec._decode_blocks(law, elements, read)
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), law])[3:]  # not where words begin
    for data in (law, odd):
        torch.testing.assert_close(codec.decode(data, elements, read), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("spelling", "elements"), DRAWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_rounds_stochastically_as_the_law(spelling: str, elements: int, dtype: torch.dtype) -> None:
    codec, draw = parse_codec(f"{spelling}:stochastic"), Draw(2**32 - 3, 2**32 - 5, 2**31 + 7)
    require_kernels(codec, dtype)
    x, first = hard(elements, dtype), 2**33 + 9
    assert torch.equal(codec.encode(x, draw=draw, first_block=first), codec._encode_blocks(x, draw, first))


@pytest.mark.parametrize("spelling", ["e4m3:1x16:e8m0", "e5m2:1x16:e8m0"])
def test_triton_rounds_scales_up_as_the_law(spelling: str) -> None:
    """Maxima beside 1.75 x 2^e, beyond which the scale is the next power of two, from the least."""
    codec = parse_codec(spelling)
    require_kernels(codec, torch.float32)
    exponents = torch.tensor([0, 1, 7, 8, 9, 10, 14, 15, 16, 17, 126, 127, 254])
    pattern = (exponents << 23)[:, None] + torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    x = torch.zeros(pattern.numel(), 16)
    x[:, 3] = pattern.flatten().to(torch.int32).view(torch.float32)
    assert torch.equal(codec.encode(x), codec._encode_blocks(x.view(-1), None, 0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_triton_rounds_the_least_fraction_up_where_no_random_bit_is_set(device: str) -> None:
    """Fractions below 2^-20 of a step, which only a product that is rounded up keeps apart from zero."""
    codec, draw = parse_codec("e4m3:1x128:pow2:stochastic"), Draw(step=1)
    if device == "cpu":
        require_kernels(codec, torch.float32)
    block, column = (int(i[0]) for i in torch.where(block_bits(torch.arange(2**14), 128, draw) == 0))
    x = torch.full((128,), -1e-14)
    x[0 if column else 1] = 1.0
    law = codec._encode_blocks(x, draw, block)
    assert int(law[4 + column]) == 0x81
    assert torch.equal(codec.encode(x.to(device), draw=draw, first_block=block).cpu(), law)


@pytest.mark.gpu
@pytest.mark.parametrize(("spelling", "elements"), [*BLOCKS, *((f"{spelling}:stochastic", n) for spelling, n in DRAWN)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_writes_and_reads_what_a_cpu_does(spelling: str, elements: int, dtype: torch.dtype) -> None:
    codec = parse_codec(spelling)
    x, draw = hard(elements, dtype), Draw(2**32 - 3, 2**32 - 5, 2**31 + 7) if codec.is_stochastic else None
    law = codec._encode_blocks(x, draw, 9)
    assert torch.equal(codec.encode(x.cuda(), draw=draw, first_block=9).cpu(), law)
    ahead = torch.cat([x[:3], x]).cuda()[3:]  # not where vectors begin
    assert torch.equal(codec.encode(ahead, draw=draw, first_block=9).cpu(), law)
    values = codec._decode_blocks(law, elements, dtype)
    torch.testing.assert_close(codec.decode(law.cuda(), elements, dtype).cpu(), values, rtol=0, atol=0, equal_nan=True)


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_what_the_kernels_do_not_write() -> None:
    for text in ("int8:1x128", "e4m3:1x100", "e5m2:1x128:stochastic", "e4m3:1x2048"):
        assert not wire.supports(Spec.parse(text), torch.float32, torch.device("cpu"))
