"""Lookups in tables of any precision: the law against plain torch, every backend against the law."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.interpreter import NOT_RUN, run_interpreted
from kernels.table_cases import FORMATS, bags, table
from loka.formats import Spec, fake_quantize, quantize
from loka.kernels import registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.embedding_bag import BagCall, Rows, embedding_bag, parse_rows
from loka.kernels.embedding_bag.rows import decode_scale, encode_scale, largest_element
from loka.measure.conformance import poisoned_allocations

formats = pytest.mark.parametrize("kind", FORMATS)


def skip_unless_run(call: BagCall, device: torch.device) -> None:
    verdict = registry.backend("embedding_bag", "triton").supports(call, device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")


@formats
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_law_is_torchs_embedding_bag_on_the_dequantised_table(kind: str, mode: str) -> None:
    rows, (indices, offsets) = table(kind), bags()
    expected = F.embedding_bag(indices, rows.dequantize(), offsets, mode=mode, include_last_offset=True)
    torch.testing.assert_close(
        embedding_bag(rows, indices, offsets, mode=mode, backend="reference"), expected, rtol=1e-5, atol=1e-5
    )
    assert bool((expected[0] == 0).all())


@formats
def test_weights_per_sample_and_single_items(kind: str) -> None:
    rows, (indices, offsets) = table(kind, hot=True), bags()
    weights = torch.randn(len(indices))
    expected = F.embedding_bag(
        indices, rows.dequantize(), offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    torch.testing.assert_close(
        embedding_bag(rows, indices, offsets, weights=weights, backend="reference"), expected, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(embedding_bag(rows, indices, backend="reference"), rows.dequantize()[indices])


LOW = ("int8:row", "e4m3:row", "e4m3:row:pow2", "e5m2:row", "int4:row")
low = pytest.mark.parametrize("kind", LOW)


@low
def test_rows_are_quantised_by_the_law_of_formats(kind: str) -> None:
    """With scales that are at most an eighth larger than exact ones.

    They are smaller where the largest element was about to be rounded to the largest value of a smaller scale.
    """
    weight, spec = torch.randn(500, 32), Spec.parse(kind)
    rows, exact = Rows.of(weight, kind), quantize(weight, spec)
    static = replace(spec, mode="static")
    assert torch.equal(rows.dequantize(), fake_quantize(weight, static, scale=rows.scale[:, None]))
    ratio = rows.scale / exact.scale[:, 0]
    if spec.scale == "pow2":
        assert set(ratio.tolist()) <= {0.5, 1.0}
    else:
        assert float(ratio.max()) <= 1.125
        assert 1.02 < float(ratio.mean()) < 1.06
        assert float(ratio.min()) > 0.9
    assert rows.kind == kind
    assert rows.data.shape == (500, 16 if kind == "int4:row" else 32)


@low
def test_scales_are_the_upper_bits_of_a_float(kind: str) -> None:
    """All 256 codes, by plain arithmetic; rounding goes up, and what cannot be held is NaN."""
    spec, code = Spec.parse(kind), torch.arange(256, dtype=torch.uint8)
    scale, bias = decode_scale(code, spec), 24 if kind == "int4:row" else 28
    expected = [2.0 ** (c // 8 - bias) * (1 + c % 8 / 8) for c in range(255)]
    assert scale[:255].tolist() == expected
    assert bool(scale[255].isnan())
    assert torch.equal(encode_scale(scale, spec), code)
    assert torch.equal(encode_scale(torch.nextafter(scale[:254], torch.tensor(torch.inf)), spec), code[1:255])
    odd = torch.tensor([2.0**-126, scale[254] * 1.001, 3e38, torch.inf, torch.nan, -torch.nan])
    assert encode_scale(odd, spec).tolist() == [0, 255, 255, 255, 255, 255]


@low
def test_packed_again_rows_do_not_change(kind: str) -> None:
    """A state_dict has float values: what was served must be what is loaded."""
    weight = torch.randn(4000, 24) * torch.logspace(-6, 2, 4000)[:, None]
    rows = Rows.of(weight, kind)
    again = Rows.of(rows.dequantize(), kind)
    assert torch.equal(again.dequantize(), rows.dequantize())
    half_steps = (rows.dequantize() - weight).abs().amax(1) / rows.scale
    if rows.spec.format.is_integer:
        assert float(half_steps.max()) <= 0.5001  # nothing saturates


@low
def test_rows_at_the_edges_of_the_range(kind: str) -> None:
    spec = Spec.parse(kind)
    largest = largest_element(spec)
    assert largest > 1000
    assert torch.equal(Rows.of(torch.full((1, 6), largest), kind).dequantize(), torch.full((1, 6), largest))
    with pytest.raises(ValueError, match=r"row 1 has an element of .*hint: bfloat16"):
        Rows.of(torch.tensor([[1.0] * 6, [largest * 1.1] * 6]), kind)
    tiny = torch.tensor([[1e-7, -3e-8, 0.0, 1e-12, 1e-7, 1e-30], [0.0] * 6])
    rows = Rows.of(tiny, kind)
    if spec.format.is_integer:
        assert int(rows.scale_code[0]) == 0
        assert float((rows.dequantize() - tiny).abs().max()) <= float(rows.scale[0]) / 2
    else:  # a small scale does not matter to a float
        assert torch.equal(
            rows.dequantize(), fake_quantize(tiny, replace(spec, mode="static"), scale=rows.scale[:, None])
        )
        assert float((rows.dequantize() - tiny)[0].norm() / tiny[0].norm()) < 0.06
    strange = torch.ones(3, 6)
    strange[0, 1], strange[2, 4] = math.nan, math.inf
    seen = Rows.of(strange, kind).dequantize().isfinite()
    assert bool(seen[1].all())
    if spec.format.has_nan:
        assert int((~seen).sum()) == 2
    else:  # NaN needs a place: the scale
        assert not bool(seen[[0, 2]].any())
    one = Rows.of(torch.tensor([[1.0, -0.5, 0.25, 2.0]]), kind)
    assert one.count == 1
    assert torch.equal(embedding_bag(one, torch.tensor([0, 0]), backend="reference")[1], one.dequantize()[0])


@formats
@pytest.mark.parametrize(("width", "mode"), [(8, "sum"), (24, "sum"), (100, "mean"), (128, "item"), (5, "sum")])
def test_triton_is_the_law(kind: str, width: int, mode: str, device: torch.device) -> None:
    width += kind == "int4:row" and width % 2  # pairs
    rows, (indices, offsets) = table(kind, width=width, hot=width == 24), bags()
    skip_unless_run(BagCall(50, width, 9, len(indices), kind, mode), device)
    given = None if mode == "item" else offsets.to(device)
    kept = [None if t is None else t.to(device) for t in (rows.slot, rows.hot)]
    made = Rows.of(rows.dequantize().to(device), kind)
    rows = Rows(made.data, made.scale_code, made.spec, *kept)
    items = indices.to(device)
    weights = torch.randn(len(indices), device=device) if mode == "sum" else None
    options = {"weights": weights, "mode": "sum" if mode == "item" else mode}
    law = embedding_bag(rows, items, given, **options, backend="reference")
    found = embedding_bag(rows, items, given, **options, backend="triton")
    with poisoned_allocations():
        poisoned = embedding_bag(rows, items, given, **options, backend="triton")
    torch.testing.assert_close(found, law, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, poisoned)
    half = embedding_bag(rows, items, given, **options, out_dtype=torch.bfloat16, backend="triton")
    torch.testing.assert_close(half.float(), law, rtol=8e-3, atol=8e-3)


@formats
@pytest.mark.parametrize("mode", ["sum", "mean", "item"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_triton_answers_nan_for_a_row_that_is_not_there(
    kind: str, mode: str, dtype: torch.dtype, device: torch.device
) -> None:
    from loka.kernels.embedding_bag import triton

    skip_unless_run(BagCall(50, 24, 2, 4, kind), device)
    rows = table(kind, hot=True)
    rows = Rows(*(None if part is None else part.to(device) for part in (rows.data, rows.scale_code)), rows.spec, rows.slot.to(device), rows.hot.to(device))  # fmt: skip
    indices = torch.tensor([3, 50, 1, -1, 2, 7, 2**31 - 1], device=device).to(dtype)
    offsets = torch.tensor([0, 1, 2, 3, 6, 7], device=device)
    options = {"mode": "mean" if mode == "mean" else "sum"}
    if mode == "sum":
        options["weights"] = torch.zeros(7, device=device)
    out = triton.run(rows, indices, None if mode == "item" else offsets, **options)
    lost = [False, True, False, True, False, False, True] if mode == "item" else [False, True, False, True, True]
    assert out.isnan().all(1).tolist() == lost
    assert out.isnan().any(1).tolist() == lost


@pytest.mark.parametrize("kind", ["int8:row", "e4m3:row", "int4:row"])
def test_triton_decodes_every_scale_to_the_bit(kind: str, device: torch.device) -> None:
    rows = Rows.of(torch.ones(256, 6, device=device), kind)
    rows.scale_code.copy_(torch.arange(256))
    skip_unless_run(BagCall(256, 6, 256, 256, kind, "item"), device)
    law, found = (
        embedding_bag(rows, torch.arange(256, device=device), backend=name) for name in ("reference", "triton")
    )
    assert bool(law[:255].isfinite().all())
    assert bool(law[255].isnan().all())
    assert torch.equal(found[:255], law[:255])
    assert bool(found[255].isnan().all())


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_torch_is_the_law_for_float_rows(kind: str) -> None:
    rows, (indices, offsets) = table(kind), bags()
    if kind == "bfloat16":
        with pytest.raises(UnsupportedError, match="pools bfloat16 rows into bfloat16"):
            embedding_bag(rows, indices, offsets, backend="torch")
        out = embedding_bag(rows, indices, backend="torch")
        assert torch.equal(out, embedding_bag(rows, indices, backend="reference"))
        return
    torch.testing.assert_close(
        embedding_bag(rows, indices, offsets, backend="torch"),
        embedding_bag(rows, indices, offsets, backend="reference"),
    )


@pytest.mark.parametrize(
    ("indices", "offsets", "options", "message"),
    [
        ([50], None, {}, "rows 0 to 49"),
        ([-1], None, {}, "rows 0 to 49"),
        ([1, 2], [0, 1], {}, "rise from 0"),
        ([1, 2], [0, 2], {"mode": "max"}, "max has no gradient"),
        ([1, 2], [0, 2], {"mode": "mean", "weights": torch.ones(2)}, "belong to sums"),
        ([1, 2], [0, 2], {"weights": torch.ones(3)}, "one weight per item"),
        ([1, 2], None, {"weights": torch.ones(2)}, r"weights without offsets.*hint: embedding_bag\(rows, indices\)"),
    ],
)
def test_what_is_no_lookup_is_refused(indices: list, offsets: list | None, options: dict, message: str) -> None:
    given = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(ValueError, match=message):
        embedding_bag(table("int8:row"), torch.tensor(indices), given, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("int8:tensor", "one scale each"),
        ("int8:row:stochastic", "update"),
        ("fp8", "unknown row format"),
        ("e2m1:row", "one scale each"),
    ],
)
def test_what_are_no_rows_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rows(kind)


def test_no_items_at_all() -> None:
    rows = table("int8:row")
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(embedding_bag(rows, none, torch.zeros(4, dtype=torch.int64)), torch.zeros(3, 24))
    assert embedding_bag(rows, none).shape == (0, 24)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("mode", ["sum", "mean", "item"])
def test_fbgemm_is_the_law_where_it_is_installed(kind: str, mode: str) -> None:
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed: pip install 'loka[torchrec]'")
    rows, (indices, offsets) = table(kind), bags()
    starts, weights = (
        (None, None) if mode == "item" else (offsets, torch.randn(len(indices)) if mode == "sum" else None)
    )
    expected = embedding_bag(rows, indices, starts, weights=weights, mode=mode, backend="reference")
    found = embedding_bag(rows, indices, starts, weights=weights, mode=mode, backend="fbgemm")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_fbgemm_refuses_rows_of_another_layout() -> None:
    with pytest.raises(ValueError, match="would have to be copied"):
        embedding_bag(table("int8:row"), torch.tensor([1]), backend="fbgemm")


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    code = "import torch; from loka.nn.tables import Embedding; table = Embedding(8, 16).eval().requires_grad_(False); print(*torch.compile(table, fullgraph=True, backend='eager')(torch.arange(6)).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "6 16\n", done.stderr[-2000:]


def test_asked_in_compiled_code_a_backend_makes_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot trace that: every lookup would end a graph."""
    call = BagCall(8, 16, 4, 6, "int8:row", "sum", False, False, torch.float32)
    refused = BagCall(8, 16, 4, 6, "e5m2:row", "sum", False, False, torch.float32)
    monkeypatch.setattr(Spec, "parse", lambda text: pytest.fail(f"made {text}"))
    asked = registry.backend("embedding_bag", "triton").supports
    assert "reads float" not in (asked(call, torch.device("cpu")).reason or "")
    assert "reads float, int8, e4m3 and int4 rows, not e5m2:row" in asked(refused, torch.device("cpu")).reason
