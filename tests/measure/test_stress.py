"""The gate's operands are what their names say, at any shape and Spec."""

import pytest
import torch

from loka.formats import decode
from loka.measure.adapter import parse_variant
from loka.measure.stress import MATMUL_SETS, QUANTIZE_SETS, duplicate_rows, matmul_set, quantize_set

CPU = torch.device("cpu")
CALL = parse_variant("e4m3:row@e4m3:row", (80, 48, 64))


def elements(name: str, variant: str = "e4m3:row@e4m3:row") -> torch.Tensor:
    a = matmul_set(parse_variant(variant, (80, 48, 64)), name, seed=0, device=CPU).a
    return decode(a.data, a.spec.format)


@pytest.mark.parametrize("name", MATMUL_SETS)
@pytest.mark.parametrize("variant", ["e4m3:row@e4m3:row", "e4m3:tensor@e5m2:tensor", "e4m3:1x128@e4m3:128x128", "int8:row@int8:row|float32", "e4m3:1x32:e8m0@e4m3:1x32:e8m0"])  # fmt: skip
def test_sets_fit_their_call_and_differ_by_seed(name: str, variant: str) -> None:
    call = parse_variant(variant, (20, 150, 9))
    first, again, other = (matmul_set(call, name, seed=seed, device=CPU) for seed in (0, 0, 1))
    assert (first.a.shape, first.b.shape, first.a.spec, first.b.spec) == ((20, 150), (9, 150), call.a, call.b)
    for q in (first.a, first.b):
        bad = q.dequantize().isnan()
        assert int(bad.sum()) == (q.shape[0] // 8 if name == "extreme" and q.spec.format.has_nan else 0)
        assert bad.any(1).sum() == bad.sum()  # a row each
        assert not q.dequantize().isinf().any()
        assert (q.scale > 0).all()
    assert torch.equal(first.a.data.view(torch.uint8), again.a.data.view(torch.uint8))
    assert not torch.equal(first.b.dequantize(), other.b.dequantize())


def test_sets_are_what_they_say() -> None:
    assert (elements("saturated").abs() == 448).all()
    assert (elements("tiny").abs() <= 2**-6).float().mean() > 0.6
    impulses = elements("impulses")
    assert ((impulses != 0).sum(1)[::2] == 1).all()
    assert (impulses[1::2] == 0).all()
    assert impulses.abs().amax(0).count_nonzero() > 35  # nearly all columns in turn: 40 rows of them
    assert (elements("heavy")[::2] == 0).all()
    heavy = matmul_set(CALL, "heavy", seed=0, device=CPU).b
    assert 0.3 < (decode(heavy.data, heavy.spec.format) >= 0).all(1).float().mean() < 0.7
    constant = elements("constant")
    assert (constant == constant[0]).all()
    scale = matmul_set(CALL, "constant", seed=0, device=CPU).a.scale.flatten()
    assert len(scale.unique()) == 2
    huge = matmul_set(CALL, "huge", seed=0, device=CPU).b
    largest, second = decode(huge.data, huge.spec.format).abs().topk(2, dim=1).values.T
    assert (largest[::2] > 64 * second[::2]).all()
    assert (second[::4] == 0).all()
    assert (second[2::4] > 0).all()
    assert (largest[1::2] < 4 * second[1::2]).all()
    extreme = elements("extreme")
    assert (extreme == 0).all(1).any()
    assert (extreme.abs() == 448).all(1).any()


@pytest.mark.parametrize("what", ["element", "value"])
def test_a_rectified_operand_is_what_a_relu_gives(what: str) -> None:
    x = elements("rectified") if what == "element" else quantize_set("rectified", 80, 48, seed=1, dtype=torch.float32, device=CPU)  # fmt: skip
    plain = x[::2]
    assert (x >= 0).all()
    assert 0.4 < (plain == 0).float().mean() < 0.6
    assert torch.equal(x[:, ::2], x[:, 1::2])
    assert (x[1::8] > 0).float().mean() > 0.99
    assert (x[3::8] == x[3::8, :1]).all()
    assert (x[5::8, 24:] == 0).all()
    assert x[5::8, :24].any()


def test_a_few_rows_contain_no_nan() -> None:
    few = matmul_set(parse_variant("e4m3:row@e4m3:row", (3, 48, 64)), "extreme", seed=0, device=CPU)
    assert few.a.dequantize().isfinite().all()
    assert few.b.dequantize().isnan().nonzero()[:, 1].sort().values.tolist() == [0, 24, 47]


def test_turned_and_rescaled_are_nearly_flat() -> None:
    flat, turned, rescaled = (matmul_set(CALL, name, seed=0, device=CPU) for name in ("flat", "turned", "rescaled"))
    for ours, theirs in ((flat.a, turned.a), (flat.b, turned.b)):
        changed = (ours.dequantize() != theirs.dequantize()).any(1)
        assert changed.sum() == 1
        assert not changed[0]
    assert torch.equal(flat.b.data.float(), rescaled.b.data.float())
    assert not torch.equal(flat.b.scale, rescaled.b.scale)


def test_scales_of_all_rows_and_sets_differ() -> None:
    seen = torch.cat(
        [
            matmul_set(CALL, name, seed=0, device=CPU).a.scale.flatten()
            for name in ("spread", "huge", "tiny", "saturated")
        ]
    )
    assert len(seen.unique()) == len(seen)
    one = [
        float(matmul_set(parse_variant("e4m3:tensor@e4m3:tensor", (8, 8, 8)), name, seed=0, device=CPU).a.scale)
        for name in MATMUL_SETS[3:]
    ]
    assert len(set(one)) == len(one)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 50, 1000])
def test_duplicates_are_at_many_distances(rows: int) -> None:
    index, twice = duplicate_rows(rows, torch.Generator().manual_seed(0), device=CPU)
    assert index.shape == twice.shape == (rows,)
    if rows >= 2:
        assert index[-1] == index[0]
    if rows == 1000:
        counts = torch.bincount(index, minlength=rows)
        assert counts.max() > 50  # a large group
        assert (counts == 2).sum() > 20  # and pairs
        assert twice.any()
        assert (index[1:] == index[:-1]).any()


@pytest.mark.parametrize("name", QUANTIZE_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_quantisers(name: str, dtype: torch.dtype) -> None:
    x = quantize_set(name, 40, 300, seed=1, dtype=dtype, device=CPU)
    assert (x.shape, x.dtype) == ((40, 300), dtype)
    assert x.isnan().sum() == (name == "extreme")
    assert x.isinf().sum() == 2 * (name == "extreme")
    assert bool(x.any()) == (name != "zero")
    assert quantize_set(name, 0, 8, seed=1, dtype=dtype, device=CPU).shape == (0, 8)
