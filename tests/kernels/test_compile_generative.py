"""The Triton kernels of generative inference compile for Hopper (sm_90) on a machine without a GPU, as `test_compile_hopper` does for the others."""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

import triton.language as tl  # noqa: E402

from kernels.hopper import SHARED_MEMORY, compile_kernel, files_of, kernels_of, needs_ptxas  # noqa: E402

REGISTERS = 65536  # of a multiprocessor

pytestmark = needs_ptxas

S, J, L, X, Q = "*fp32", "*i32", "*i64", "*bf16", "*fp8e4nv"
SOURCE = {"x_ptr": S, "mask_ptr": "*i8", "score_ptr": S, "lse_ptr": S}
MAXIMA = {**SOURCE, "first_ptr": J, "second_ptr": J}
SELECT = {**SOURCE, "parent_ptr": J, "id_ptr": J, "key_ptr": J}


def desc(kind: str, rows: int, columns: int) -> str:
    return f"tensordesc<{kind}[{rows},{columns}]>"


def gemm(bm: int, bn: int, scales: int, **more) -> dict:
    exact = {"SCALES": scales, "EXACT": False, "IEEE": False, "OUT": tl.bfloat16, **more}
    return {"BM": bm, "BN": bn, "BK": 128, "EP": 64, **exact}


def operands(bm: int, bn: int, kind: str = "fp8e4nv", depth: int = 128) -> dict[str, str]:
    descriptors = {"a_desc": desc(kind, bm, depth), "b_desc": desc(kind, bn, depth)}
    return {**descriptors, "c_ptr": X, "sa_ptr": S, "sb_ptr": S, "offsets_ptr": J}


ATTEND = {
    "q_ptr": X, "k_ptr": X, "v_ptr": X, "k_desc": desc("bf16", 128, 128), "v_desc": desc("bf16", 128, 128), "length_ptr": J,
    "out_ptr": X, "scale": "fp32",
}  # fmt: skip
HEADS = {"HG": 1, "D": 128, "DP": 128, "TMA": True, "IEEE": False, "PARTS": 1, "SPAN": 256, "sums_ptr": None}
LOW = {"HG": 1, "D": 128, "BN": 128, "TMA": True, "PREROUND": False, "SPAN": 256}
ANCESTORS = {
    "q_ptr": X, "k_ptr": X, "v_ptr": X, "keys_ptr": X, "values_ptr": X, "ancestor_ptr": J, "scale_ptr": S, "scale": "fp32",
}  # fmt: skip
# Where experts or width are multiples of 16, launches say so: as constants here.
PLACE = {"counts_ptr": J, "order_ptr": L, "offsets_ptr": J, "inverse_ptr": L}
ROUTE = {"balance_ptr": S, "gate_ptr": S, "count_ptr": J}
PLAIN = {"FP8": False, "POW2": False, "PREROUND": False}
FUSED = {"FP8": True, "POW2": False, "PREROUND": False}

# op, kernel, what it is tried as: (pointer types, compile-time constants, launch options)
CONFIGURATIONS = {
    ("beam_attention", "_attend", "v is k"): (
        ATTEND,
        {**HEADS, "BM": 128, "BN": 128, "SHARED": True},
        {"num_warps": 8, "num_stages": 2},
    ),
    ("beam_attention", "_attend", "context in FP8"): (
        {**ATTEND, "k_ptr": Q, "v_ptr": Q, "k_desc": desc("fp8e4nv", 64, 128)},
        {**HEADS, "BM": 64, "BN": 64, "SHARED": True},
        {"num_warps": 4, "num_stages": 3},
    ),
    ("beam_attention", "_attend_low", "quantised"): (
        {**ATTEND, "k_ptr": Q, "v_ptr": Q, "k_desc": desc("fp8e4nv", 128, 128), "v_desc": desc("fp8e4nv", 128, 128)},
        {**LOW, "PARTS": 1, "sums_ptr": None, "BM": 64},
        {"num_warps": 4, "num_stages": 3},
    ),
    ("beam_attention", "_attend_low", "in parts"): (
        {
            **ATTEND,
            "k_ptr": Q,
            "v_ptr": Q,
            "out_ptr": S,
            "sums_ptr": S,
            "k_desc": desc("fp8e4nv", 128, 128),
            "v_desc": desc("fp8e4nv", 128, 128),
        },
        {**LOW, "PARTS": 12, "BM": 16},
        {"num_warps": 4, "num_stages": 3},
    ),
    ("beam_attention", "_attend", "two tensors"): (
        {**ATTEND, "v_desc": desc("bf16", 128, 128)},
        {**HEADS, "BM": 128, "BN": 128, "SHARED": False},
        {"num_warps": 8, "num_stages": 2},
    ),
    ("beam_attention", "_attend", "in parts"): (
        {**ATTEND, "out_ptr": S, "sums_ptr": S, "k_desc": desc("bf16", 64, 128)},
        {
            **{k: v for k, v in HEADS.items() if k != "sums_ptr"},
            "PARTS": 12,
            "HG": 11,
            "BM": 16,
            "BN": 64,
            "SHARED": True,
        },
        {"num_warps": 4, "num_stages": 3},
    ),
    ("beam_attention", "_join", "parts"): (
        {"sums_ptr": S, "values_ptr": S, "out_ptr": X},
        {"PARTS": 12, "HG": 11, "D": 128, "DP": 128},
        {"num_warps": 1},
    ),
    ("beam_attention", "_ancestors", "bf16"): (
        {**ANCESTORS, "out_ptr": X},
        {"D": 128, "DP": 128, "HP": 11, "BB": 1, "BR": 16, "KEEP": True, **PLAIN},
        {"num_warps": 4},
    ),
    ("beam_attention", "_ancestors", "quantised"): (
        {**ANCESTORS, "out_ptr": Q},
        {"D": 128, "DP": 128, "HP": 16, "BB": 1, "BR": 16, "KEEP": True, **FUSED},
        {"num_warps": 4},
    ),
    ("grouped_mm", "_grouped", "blocks"): (operands(64, 128), gemm(64, 128, 3), {"num_warps": 4, "num_stages": 3}),
    ("grouped_mm", "_grouped", "blocks large"): (
        operands(128, 128),
        gemm(128, 128, 3),
        {"num_warps": 8, "num_stages": 4},
    ),
    ("grouped_mm", "_grouped", "rows, fast"): (
        operands(128, 256),
        gemm(128, 256, 2),
        {"num_warps": 8, "num_stages": 3},
    ),
    ("grouped_mm", "_grouped", "rows, exact"): (
        operands(64, 128),
        gemm(64, 128, 2, EXACT=True),
        {"num_warps": 4, "num_stages": 3},
    ),
    ("grouped_mm", "_grouped", "bf16"): (
        operands(128, 128, "bf16", 64),
        gemm(128, 128, 0, BK=64),
        {"num_warps": 8, "num_stages": 4},
    ),
    ("grouped_mm", "_grouped_swiglu", "blocks"): (
        {**operands(64, 128), "c_ptr": Q, "cs_ptr": S},
        gemm(64, 128, 3, **FUSED),
        {"num_warps": 4, "num_stages": 2},
    ),
    ("grouped_mm", "_grouped_swiglu", "rows, fast"): (
        {**operands(128, 128), "c_ptr": Q, "cs_ptr": S},
        gemm(128, 128, 2, **FUSED),
        {"num_warps": 8, "num_stages": 3},
    ),
    ("grouped_mm", "_swiglu", "1x128"): (
        {"h_ptr": X, "q_ptr": Q, "s_ptr": S},
        {"BM": 32, "BF": 128, "FP8": True, "POW2": False, "PREROUND": False},
        {"num_warps": 4},
    ),
    ("route", "_route", "53 experts"): (
        {**ROUTE, "x_ptr": X, "w_ptr": X, "id_ptr": J},
        {"TOP": 3, "COLUMNS": 4, "CP": 4, "BM": 32, "EP": 64, "BK": 128, "IEEE": False, "COUNT": True},
        {"num_warps": 4, "num_stages": 5},
    ),
    ("route", "_route", "256 experts, float32"): (
        {**ROUTE, "x_ptr": S, "w_ptr": S, "id_ptr": L},
        {"TOP": 8, "COLUMNS": 8, "CP": 8, "BM": 32, "EP": 256, "BK": 32, "IEEE": True, "COUNT": False},
        {"num_warps": 4, "num_stages": 5},
    ),
    ("grouped_mm", "_count", "53 experts"): ({"ids_ptr": L, "counts_ptr": J}, {"BM": 256, "EP": 64}, {"num_warps": 4}),
    ("grouped_mm", "_place", "visits of 53 experts"): (
        {**PLACE, "ids_ptr": L},
        {"COLUMNS": 1, "BM": 256, "EP": 64, "BB": 32},
        {"num_warps": 4},
    ),
    ("grouped_mm", "_place", "visits of 256 experts"): (
        {**PLACE, "ids_ptr": L},
        {"COLUMNS": 1, "BM": kernels_of("grouped_mm").block_of(256), "EP": 256, "BB": 32, "E": 256, "width": 256},
        {"num_warps": 8},
    ),
    ("grouped_mm", "_place", "tokens of a router of 53 experts"): (
        {**PLACE, "ids_ptr": J},
        {"COLUMNS": 4, "BM": 32, "EP": 64, "BB": 32, "width": 64},
        {"num_warps": 4},
    ),
    ("grouped_mm", "_gather", "1x128"): (
        {"x_ptr": J, "s_ptr": S, "order_ptr": L, "out_ptr": J, "t_ptr": S},
        {"BM": 4, "BW": 512, "GP": 16, "SCALED": True},
        {"num_warps": 4},
    ),
    ("grouped_mm", "_combine", "top 3"): (
        {"y_ptr": X, "inverse_ptr": L, "w_ptr": S, "add_ptr": X, "out_ptr": X},
        {"TOP": 3, "BM": 4, "BD": 512, "ADD": True},
        {"num_warps": 4},
    ),
    ("topk", "_maxima", "scores"): (
        MAXIMA,
        {"C": 32, "BLOCK": 8192, "KIND": 1, "MASKED": False, "LSE": False, "TWO": True},
        {"num_warps": 8},
    ),
    ("topk", "_maxima", "masked beams in bf16"): (
        {**MAXIMA, "x_ptr": X},
        {"C": 32, "BLOCK": 8192, "KIND": 2, "MASKED": True, "LSE": True, "TWO": True},
        {"num_warps": 8},
    ),
    ("topk", "_log_sum_exp", "bf16"): ({"x_ptr": X, "lse_ptr": S}, {"BLOCK": 4096}, {"num_warps": 8}),
    ("topk", "_select", "beams"): (
        SELECT,
        {"HIGH": 512, "C": 32, "FIRST": False, "KIND": 2, "MASKED": True, "KP": 512},
        {"num_warps": 16},
    ),
    ("topk", "_select", "keys"): (
        {**SELECT, "x_ptr": J},
        {"HIGH": 128, "C": 32, "FIRST": True, "KIND": 0, "MASKED": False, "KP": 512},
        {"num_warps": 8},
    ),
    ("topk", "_rank", "sorted"): (
        {"id_ptr": J, "key_ptr": J, "value_ptr": S, "beam_ptr": L, "index_ptr": L},
        {"SORTED": True, "BEAM": True, "BI": 32, "BJ": 256},
        {"num_warps": 4},
    ),
}
MULTIPLIES = {"_attend", "_attend_low", "_grouped", "_grouped_swiglu"}
WRITES_FP8 = {"_grouped_swiglu", "_swiglu"}  # always; others where they are told to
DIVISIBLE = {
    "M",
    "N",
    "K",
    "W",
    "W1",
    "F",
    "D",
    "stride",
    "mask_stride",
    "c_stride",
    "stride_h",
    "stride_q",
    "stride_x",
    "stride_out",
    "stride_y",
    "stride_weight",
    "c_head",
    "c_beam",
    "c_request",
    "c_step",
    "q_head",
    "q_beam",
    "q_request",
}


def build(op: str, name: str, what: str):
    return compile_kernel(op, name, CONFIGURATIONS[op, name, what], DIVISIBLE)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for real: nothing found in an earlier run's cache, nothing left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=" ".join)
def test_compiles(configuration: tuple[str, str, str], own_cache: None) -> None:
    compiled = build(*configuration)
    ptx, name = compiled.asm["ptx"], configuration[1]
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert len(compiled.asm["cubin"]) > 0
    few_rows = configuration[2] == "in parts"  # tiles of 16 rows are multiplied by another instruction
    assert ("wgmma.mma_async" in ptx) == (name in MULTIPLIES and not few_rows)
    if few_rows:
        assert "mma.sync" in ptx
    if name == "_attend_low" and not few_rows:
        products = set(re.findall(r"wgmma\.mma_async\S+", ptx))
        assert products
        assert all(".e4m3.e4m3" in product for product in products)
    assert bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2", ptx)) == (
        name in WRITES_FP8 or name == "_attend_low" or configuration[2] == "quantised"
    )


@pytest.mark.parametrize("op", sorted({op for op, _, _ in CONFIGURATIONS}))
def test_every_kernel_that_is_launched_is_compiled_here(op: str) -> None:
    source = "".join(file.read_text() for file in files_of(op))
    launched = set(re.findall(r"^\s+(_\w+)\[\(", source, re.MULTILINE))
    assert launched
    assert launched == {name for room, name, _ in CONFIGURATIONS if room == op}
