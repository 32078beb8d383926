"""Lookups in tables of any precision: the law against plain torch, every backend against the law."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from kernels.interpreter import NOT_RUN, run_interpreted
from kernels.table_cases import FORMATS, bags, table
from loka.formats import Spec
from loka.kernels import registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.embedding_bag import BagCall, Rows, embedding_bag, parse_rows
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


def test_rows_are_quantised_by_the_law_of_formats() -> None:
    from loka.formats import Spec, fake_quantize

    weight = torch.randn(20, 32)
    for kind in ("int8:row", "e4m3:row:pow2", "int4:row"):
        rows = Rows.of(weight, kind)
        assert torch.equal(rows.dequantize(), fake_quantize(weight, Spec.parse(kind)))
        assert rows.kind == kind
    assert Rows.of(weight, "int4:row").data.shape == (20, 16)


@pytest.mark.parametrize("kind", ["int8:row", "e4m3:row:pow2", "int4:row"])
@pytest.mark.parametrize("width", [6, 24])
def test_where_scales_lie_changes_no_value(kind: str, width: int) -> None:
    weight = torch.randn(20, width)
    inside, beside = (Rows.of(weight, kind, inline=inline) for inline in (True, False))
    assert inside.scale is not None
    assert inside.scale.stride(0) > 1
    assert beside.scale is not None
    assert beside.scale.is_contiguous()
    assert torch.equal(inside.dequantize(), beside.dequantize())
    assert inside.bytes == beside.bytes == 20 * (-(-inside.data.shape[1] // 4) * 4 + 4)
    assert Rows.of(torch.randn(2, 600), kind).scale.is_contiguous()  # of wide rows they follow all rows
    inside.data[3], inside.scale[3] = inside.data[4], inside.scale[4]  # written in place, and nowhere else
    assert torch.equal(inside.dequantize()[3], beside.dequantize()[4])
    assert torch.equal(inside.dequantize()[4:], beside.dequantize()[4:])


@formats
@pytest.mark.parametrize(("width", "mode"), [(8, "sum"), (24, "sum"), (100, "mean"), (128, "item")])
def test_triton_is_the_law(kind: str, width: int, mode: str, device: torch.device) -> None:
    rows, (indices, offsets) = table(kind, width=width, hot=width == 24), bags()
    skip_unless_run(BagCall(50, width, 9, len(indices), kind, mode), device)
    given = None if mode == "item" else offsets.to(device)
    kept = [None if t is None else t.to(device) for t in (rows.slot, rows.hot)]
    made = Rows.of(rows.dequantize().to(device), kind)
    rows = Rows(made.data, made.scale, made.spec, *kept)
    items = indices.to(device)
    if width == 128 and rows.scale is not None:  # the other layout; `table` has scales in the rows
        rows = Rows(rows.data.contiguous(), rows.scale.contiguous(), rows.spec)
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


def test_triton_answers_nan_for_a_row_that_is_not_there(device: torch.device) -> None:
    from loka.kernels.embedding_bag import triton

    skip_unless_run(BagCall(50, 24, 2, 4, "int8:row"), device)
    rows = Rows.of(torch.randn(50, 24, device=device), "int8:row")
    indices, offsets = torch.tensor([3, 50, 1, -1], device=device), torch.tensor([0, 1, 2, 3, 4], device=device)
    out = triton.run(rows, indices, offsets)
    assert out.isnan().all(1).tolist() == [False, True, False, True]


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
        ("int8:tensor", "one float32 scale each"),
        ("int8:row:stochastic", "update"),
        ("fp8", "unknown row format"),
        ("e2m1:row", "one float32 scale"),
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


def test_fbgemm_refuses_rows_whose_scales_it_would_round() -> None:
    with pytest.raises(ValueError, match="round the scales"):
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
