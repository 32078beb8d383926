"""Bytes for the wire: the kernels write and read what the codec's torch operations do."""

import math

import pytest
import torch

from kernels.interpreter import NOT_RUN, run_interpreted
from loka.formats import Draw, Spec
from loka.kernels import wire
from loka.kernels.wire.codec import parse_codec


def hard(elements: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(elements) * torch.logspace(-6, 4, elements)
    x[5], x[300], x[301] = 0.0, 2.0**-120, 1e4
    x[128:256] = 0
    return x.to(dtype)


@pytest.mark.parametrize("spelling", ["e4m3:1x128:pow2", "e4m3:1x32:e8m0", "e5m2:1x128", "e5m2:1x64:e8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_writes_and_reads_the_law(spelling: str, dtype: torch.dtype) -> None:
    codec = parse_codec(spelling)
    verdict = wire.supports(codec.spec, dtype, torch.device("cpu"))
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    x = hard(1000, dtype)  # a last block that is cut short
    law = codec._encode_blocks(x, None, 0)
    found = codec.encode(x)
    differ = found != law
    assert set(found[differ].tolist()) <= {0}  # the interpreter's cast to E4M3 drops the sign of zero
    assert set(law[differ].tolist()) <= {128}
    torch.testing.assert_close(
        codec.decode(law, 1000, dtype), codec._decode_blocks(law, 1000, dtype), rtol=0, atol=0, equal_nan=True
    )
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), law])[3:]  # not where words begin
    assert torch.equal(codec.decode(odd, 1000), codec._decode_blocks(law, 1000, torch.float32))
    if spelling.startswith("e5m2"):
        return  # the interpreter reads and writes its NaN as a number
    x[7], x[500] = math.nan, math.inf
    assert torch.equal(
        codec.decode(codec.encode(x), 1000).isfinite(),
        codec._decode_blocks(codec._encode_blocks(x, None, 0), 1000, torch.float32).isfinite(),
    )


def test_triton_rounds_stochastically_as_the_law() -> None:
    codec, draw = parse_codec("e4m3:1x32:pow2:stochastic"), Draw(3, 5, 7)
    if not wire.supports(codec.spec, torch.float32, torch.device("cpu")):
        pytest.skip(NOT_RUN)
    x = hard(1000, torch.float32)
    found = codec.decode(codec.encode(x, draw=draw, first_block=9), 1000)
    assert torch.equal(found, codec._decode_blocks(codec._encode_blocks(x, draw, 9), 1000, torch.float32))


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_what_the_kernels_do_not_write() -> None:
    for text in ("int8:1x128", "e4m3:1x100", "e5m2:1x128:stochastic", "e4m3:1x2048"):
        assert not wire.supports(Spec.parse(text), torch.float32, torch.device("cpu"))
