"""Every Triton kernel compiles for Hopper (sm_90) on a machine without a GPU: the interpreter proves values, this proves code.

One representative configuration per kernel, as the launchers choose it for a large bf16 tensor. The compiled code must use the warp-group matrix
instructions where it multiplies, the hardware's saturating FP8 conversion where it quantises, and fit into the shared memory of a multiprocessor.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

import triton.language as tl  # noqa: E402

from kernels.hopper import SHARED_MEMORY, compile_kernel, files_of, kernel_of, kernels_of, needs_ptxas  # noqa: E402
from loka.kernels.activation import ACTIVATIONS  # noqa: E402
from loka.kernels.fused_linear.launch import Launch, Work, waiting_bytes  # noqa: E402

OPS = ("quantize", "norm_quantize", "scaled_mm", "fused_linear", "interaction")

pytestmark = needs_ptxas


def desc(kind: str, rows: int, columns: int) -> str:
    return f"tensordesc<{kind}[{rows},{columns}]>"


ROUNDED = {"E5M2": False, "POW2": False, "STOCHASTIC": False, "PREROUND": False}
BOTH_ROUNDED = {**ROUNDED, "T_E5M2": False, "T_POW2": False, "T_STOCHASTIC": False}
X, Q, S = "*bf16", "*fp8e4nv", "*fp32"
QUANTIZE = {"x_ptr": X, "q_ptr": Q, "s_ptr": S}
DRAW = {"seed_ptr": "*i64", "upscale": "fp32"}
NORM = {"NORM": 0, "ACTIVATION": 3, "WEIGHT": True, "BIAS": True, "RESIDUAL": True, "DROP": False, "PREROUND": False}
BOTH_WAYS = {
    "ROWS": 16, "BK": 512, "NORM": 0, "WEIGHT": True, "BIAS": True, "X_SCALE": 0, "E5M2": False, "AMAX": True, "ALIGN": 16, "DROP": False, "PREROUND": False,
}  # fmt: skip
TILE = {"BM": 128, "BN": 256, "BK": 128, "GROUP_M": 8, "PROGRAMS": 132, "A_SCALE": 2, "B_SCALE": 2}
FUSED = {
    "a_desc": desc("fp8e4nv", 128, 128), "b_desc": desc("fp8e4nv", 256, 128), "y_desc": desc("fp8e4nv", 128, 128),
    "yt_desc": desc("fp8e4nv", 128, 128), "z_desc": desc("fp8e4nv", 128, 128), "part_desc": desc("fp32", 128, 64), "sa_ptr": S, "sb_ptr": S, "bias_ptr": X,
    "out_scale_ptr": S, "ys_ptr": S, "yts_ptr": S, "rstd_ptr": S, "amax_ptr": "*i32", **DRAW,
}  # fmt: skip
LAYER = {
    **{name: value for name, value in TILE.items() if name != "PROGRAMS"},
    "HALVES": True,
    "SPLITS": False,
    "NORM": True,
    "ACTIVATION": 3,
    "OUT_E5M2": False,
    "OUT_POW2": False,
    "OUT_TYPE": tl.bfloat16,
    "AMAX": False,
    "SLOPE": 0.01,
    "DROP": False,
    "PREROUND": False,
}
GRADIENT = {
    "dy_ptr": X, "z_ptr": Q, "z_scale_ptr": S, "rstd_ptr": S, "scale_ptr": S, "g_ptr": Q, "gs_ptr": S, "gt_ptr": "*i32", "gts_ptr": S,
    "bias_ptr": S, "amax_ptr": "*i32", **DRAW,
}  # fmt: skip
BACK = {
    "BN": 256,
    "NORM": True,
    "ACTIVATION": 3,
    "Z": 1,
    "SLOPE": 0.01,
    "E5M2": False,
    "POW2": False,
    "T_E5M2": False,
    "T_POW2": False,
    "DROP": 0,
    "PREROUND": False,
}

DGRAD = {
    "g_desc": desc("fp8e4nv", 128, 128), "w_desc": desc("fp8e4nv", 256, 128), "z_desc": desc("fp8e4nv", 128, 256), "q_desc": desc("fp8e4nv", 128, 128),
    "qt_desc": desc("fp8e4nv", 128, 128), "z_ptr": Q, "sg_ptr": S, "sw_ptr": S, "z_scale_ptr": S, "scale_ptr": S, "amax_ptr": "*i32", "bias_ptr": S, **DRAW,
}  # fmt: skip
STEP = {
    "BM": 128, "BN": 256, "BK": 128, "GROUP_M": 8, "Z_BYTES": 1, "SLOPE": 0.01, "E5M2": False, "AMAX": True, "BIAS": True, "DROP": 0, "PREROUND": False,
}  # fmt: skip

INTERACTION = {"x_ptr": X, "weight_ptr": X, "next_ptr": X}
VECTORS = {"D": 128, "K": 24, "NL": 32, "NF": 32, "BD": 128, "BK": 32, "BL": 32, "BF": 32}
BACKWARD = {"x_ptr": X, "weight_ptr": X, "dq_ptr": X, "ds_ptr": X, "dx_ptr": X, "dw_ptr": S}
MIXED = {
    **{name: VECTORS[name] for name in ("D", "K", "NL", "NF", "BK", "BL")},
    "BD": 128, "BO": 64, "BLOCKS": 16, "PROGRAMS": 264, "PREROUND": False,
}  # fmt: skip

# op, kernel, what it is tried as: (pointer types, compile-time constants, launch options)
CONFIGURATIONS = {
    ("quantize", "_rows", "row"): (
        QUANTIZE, {"ROWS": 1, "BLOCK": 4096, "WHOLE": True, "ALIGN": 16, **ROUNDED}, {"num_warps": 4},
    ),
    ("quantize", "_tiles", "1x128"): (
        QUANTIZE, {"part_ptr": None, "BM": 32, "BK": 128, "ALIGN": 16, "COUNT": 0, "SCALE": 3, **ROUNDED}, {"num_warps": 4},
    ),
    ("quantize", "_tiles", "one scale, from maxima"): (
        {**QUANTIZE, "part_ptr": S}, {"BM": 32, "BK": 128, "ALIGN": 16, "COUNT": 512, "SCALE": 5, **ROUNDED}, {"num_warps": 4},
    ),
    ("quantize", "_both", "one scale, from maxima"): (
        {**QUANTIZE, "qt_ptr": "*i32", "st_ptr": S, "part_ptr": S},
        {"BM": 128, "BK": 128, "ALIGN": 16, "COUNT": 512, "BACKWARDS": True, "SCALE": 5, "TSCALE": 5, **BOTH_ROUNDED},
        {"num_warps": 4, "maxnreg": 168},
    ),
    ("quantize", "_both", "1x128 both ways"): (
        {**QUANTIZE, "qt_ptr": "*i32", "st_ptr": S},
        {"part_ptr": None, "BM": 128, "BK": 128, "ALIGN": 16, "COUNT": 0, "BACKWARDS": False, "SCALE": 3, "TSCALE": 3, **BOTH_ROUNDED},
        {"num_warps": 4, "maxnreg": 168},
    ),
    ("quantize", "_both", "the transpose alone, one scale"): (
        {"x_ptr": X, "qt_ptr": "*i32", "st_ptr": S},
        {"q_ptr": None, "s_ptr": None, "part_ptr": None, "BM": 128, "BK": 128, "ALIGN": 16, "COUNT": 0, "BACKWARDS": True, "SCALE": 0, "TSCALE": 1, **BOTH_ROUNDED},
        {"num_warps": 4, "maxnreg": 168},
    ),
    ("quantize", "_maxima", "all maxima"): (
        {"x_ptr": X, "row_ptr": S, "column_ptr": S, "tensor_ptr": S},
        {"BM": 64, "BK": 128, "ALIGN": 16, "ROW": True, "COLUMN": True, "TENSOR": True, "FAST": True},
        {"num_warps": 8},
    ),
    ("quantize", "_maxima", "of the tensor"): (
        {"x_ptr": X, "tensor_ptr": S},
        {"row_ptr": None, "column_ptr": None, "BM": 64, "BK": 128, "ALIGN": 16, "ROW": False, "COLUMN": False, "TENSOR": True, "FAST": True},
        {"num_warps": 8},
    ),
    ("quantize", "_maxima_of_pairs", "of rows and columns"): (
        {"x_ptr": "*i32", "row_ptr": S, "column_ptr": S},
        {"tensor_ptr": None, "BM": 64, "BK": 64, "ALIGN": 8, "ROW": True, "COLUMN": True, "TENSOR": False, "HALF": False},
        {"num_warps": 8},
    ),
    ("quantize", "_maxima_of_pairs", "of the tensor, fp16"): (
        {"x_ptr": "*i32", "tensor_ptr": S},
        {"row_ptr": None, "column_ptr": None, "BM": 64, "BK": 64, "ALIGN": 8, "ROW": False, "COLUMN": False, "TENSOR": True, "HALF": True},
        {"num_warps": 8},
    ),
    ("quantize", "_grouped", "1x128 both ways"): (
        {"x_ptr": "*i32", "q_ptr": "*i16", "s_ptr": S, "qt_ptr": "*i32", "st_ptr": S},
        {"TILE": 128, "ALIGN": 8, "HALF": False, "POW2": False, "T_POW2": False, "PREROUND": False},
        {"num_warps": 4, "maxnreg": 168},
    ),
    ("quantize", "_turn", "bytes"): (
        {"x_ptr": "*u8", "t_ptr": "*i32"}, {"BM": 128, "BK": 128, "ALIGN": 16}, {"num_warps": 4},
    ),
    ("quantize", "_scales", "of rows and columns, pow2"): (
        {"row_ptr": S, "s_ptr": S, "column_ptr": S, "st_ptr": S},
        {"PARTS": 64, "BLOCK": 32, "E5M2": False, "POW2": True, "T_E5M2": False, "T_POW2": True},
        {"num_warps": 4},
    ),
    ("quantize", "_scales", "of a tensor"): (
        {"row_ptr": S, "s_ptr": S},
        {"column_ptr": None, "st_ptr": None, "PARTS": 4096, "BLOCK": 1, "E5M2": False, "POW2": False, "T_E5M2": False, "T_POW2": False},
        {"num_warps": 4},
    ),
    ("norm_quantize", "_forward", "layer norm to 1x128"): (
        {**QUANTIZE, "xs_ptr": S, "r_ptr": X, "h_ptr": X, "w_ptr": X, "b_ptr": X, "made_ptr": S, "y_ptr": X, "mean_ptr": S, "rstd_ptr": S, "amax_ptr": S, "head_ptr": X, "dots_ptr": S, "eps": "fp32", **DRAW},
        {**NORM, "ROWS": 1, "WIDE": 4096, "REST": 0, "OUT": True, "SCALE": 3, "E5M2": False, "POW2": False, "FULL": True, "EVEN": True, "X_SCALE": 0, "AMAX": True, "ALIGN": 16, "HEADS": 3, "STAGES": 3},
        {"num_warps": 4},
    ),
    ("norm_quantize", "_backward", "layer norm"): (
        {"dy_ptr": X, "h_ptr": X, "hs_ptr": S, "w_ptr": X, "b_ptr": X, "mean_ptr": S, "rstd_ptr": S, "dh_ptr": X, "dx_ptr": X, "dw_ptr": S, "db_ptr": S, "amax_ptr": S, **DRAW},
        {**NORM, "ROWS": 1, "WIDE": 4096, "X_SCALE": 0, "AMAX": True, "ALIGN": 16},
        {"num_warps": 8},
    ),
    ("norm_quantize", "_forward_both", "layer norm both ways"): (
        {
            "x_ptr": X, "xs_ptr": S, "w_ptr": X, "b_ptr": X, "s_ptr": S, "made_ptr": S, "q_ptr": Q, "qt_ptr": "*i32", "mean_ptr": S, "rstd_ptr": S, "amax_ptr": S,
            "eps": "fp32", **DRAW,
        },
        {**BOTH_WAYS, "ACTIVATION": 2},
        {"num_warps": 8},
    ),
    ("norm_quantize", "_forward_both", "layer norm both ways, with dropout"): (
        {
            "x_ptr": X, "xs_ptr": S, "w_ptr": X, "b_ptr": X, "s_ptr": S, "made_ptr": S, "q_ptr": Q, "qt_ptr": "*i32", "mean_ptr": S, "rstd_ptr": S, "amax_ptr": S,
            "eps": "fp32", **DRAW,
        },
        {**BOTH_WAYS, "ACTIVATION": 2, "DROP": True},
        {"num_warps": 8},
    ),
    ("norm_quantize", "_backward", "layer norm, with dropout"): (
        {"dy_ptr": X, "h_ptr": X, "hs_ptr": S, "w_ptr": X, "b_ptr": X, "mean_ptr": S, "rstd_ptr": S, "dh_ptr": X, "dx_ptr": X, "dw_ptr": S, "db_ptr": S, "amax_ptr": S, **DRAW},
        {**NORM, "ROWS": 1, "WIDE": 4096, "X_SCALE": 0, "AMAX": True, "ALIGN": 16, "DROP": True},
        {"num_warps": 8},
    ),
    ("norm_quantize", "_backward_both", "layer norm both ways"): (
        {
            "dy_ptr": X, "x_ptr": X, "xs_ptr": S, "w_ptr": X, "b_ptr": X, "mean_ptr": S, "rstd_ptr": S, "s_ptr": S, "dx_ptr": Q, "dxt_ptr": "*i32",
            "dw_ptr": S, "db_ptr": S, "amax_ptr": S, **DRAW,
        },
        {**BOTH_WAYS, "ACTIVATION": 2},
        {"num_warps": 8},
    ),
    ("scaled_mm", "_gemm", "row, fast"): (
        {"a_desc": FUSED["a_desc"], "b_desc": FUSED["b_desc"], "c_desc": desc("bf16", 128, 256), "c_ptr": X, "sa_ptr": S, "sb_ptr": S},
        {**TILE, "EXACT": False, "TMA_STORE": True, "OUT": tl.bfloat16},
        {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_fused", "inference"): (
        FUSED, {**LAYER, "BIAS": False, "OUT": 1, "KEEP": 0, "TRANSPOSE": False}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_fused", "training"): (
        FUSED, {**LAYER, "BIAS": True, "OUT": 1, "KEEP": 1, "TRANSPOSE": True}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_fused", "gelu without a norm, training"): (
        FUSED,
        {**LAYER, "NORM": False, "ACTIVATION": 4, "AMAX": True, "BIAS": True, "OUT": 1, "KEEP": 2, "TRANSPOSE": True},
        {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_fused", "relu with dropout, training"): (
        FUSED,
        {**LAYER, "NORM": False, "ACTIVATION": 1, "AMAX": True, "BIAS": True, "OUT": 1, "KEEP": 0, "TRANSPOSE": True, "DROP": True},
        {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_fused", "split"): (
        FUSED, {**LAYER, "SPLITS": True, "BIAS": False, "OUT": 1, "KEEP": 0, "TRANSPOSE": False}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_finish", "split"): (
        {
            **{name: kind for name, kind in FUSED.items() if not name.endswith("_desc") and name != "yts_ptr"}, "part_ptr": S,
            "y_desc": desc("fp8e4nv", 16, 128), "z_desc": desc("fp8e4nv", 16, 128),
        },
        {
            **{name: value for name, value in LAYER.items() if name not in ("BM", "BK", "SPLITS")},
            "ROWS": 16, "SPLIT": 8, "AMAX": True, "BIAS": True, "OUT": 1, "KEEP": 1,
        },
        {"num_warps": 4},
    ),
    ("fused_linear", "_dgrad", "relu"): (
        DGRAD, {**STEP, "ACTIVATION": 1, "Z": 2}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_dgrad", "gelu"): (
        DGRAD, {**STEP, "ACTIVATION": 4, "Z": 2}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_dgrad", "gelu with dropout"): (
        DGRAD, {**STEP, "ACTIVATION": 4, "Z": 2, "DROP": 1}, {"num_warps": 8, "num_stages": 3},
    ),
    ("fused_linear", "_gradient", "delayed, with dropout"): (GRADIENT, {**BACK, "BM": 32, "GROUPS": 0, "BIAS": True, "DROP": 1}, {"num_warps": 8}),
    ("fused_linear", "_gradient", "delayed"): (GRADIENT, {**BACK, "BM": 32, "GROUPS": 0, "BIAS": True}, {"num_warps": 8}),
    ("fused_linear", "_gradient", "1x128"): (GRADIENT, {**BACK, "BM": 128, "GROUPS": 2, "BIAS": False}, {"num_warps": 16}),
    ("fused_linear", "_gradient_amax", "dynamic"): (
        {"dy_ptr": X, "z_ptr": "*fp8e4nv", "z_scale_ptr": S, "rstd_ptr": S, "partial_ptr": S, **DRAW},
        {"BM": 32, "BN": 256, "NORM": True, "ACTIVATION": 3, "Z": 1, "SLOPE": 0.01, "DROP": 1, "PREROUND": False},
        {"num_warps": 8},
    ),
    ("interaction", "_interact", "plain residual"): (
        {**INTERACTION, "residual_ptr": X, "scale_ptr": S, "rstd_ptr": S, "q_ptr": "*fp8e4nv"},
        {"N": 64, **VECTORS, "BN": 64, "BLOCKS": 16, "PROJECT": False, "KEEP": True, "PROGRAMS": 528, "PREROUND": False},
        {"num_warps": 4, "num_stages": 2},
    ),
    ("interaction", "_interact", "projected residual"): (
        {**INTERACTION, "residual_ptr": X, "scale_ptr": S, "rstd_ptr": S, "q_ptr": "*fp8e4nv"},
        {"N": 128, **VECTORS, "BN": 128, "BLOCKS": 16, "PROJECT": True, "KEEP": True, "PROGRAMS": 528, "PREROUND": False},
        {"num_warps": 4, "num_stages": 2},
    ),
    ("interaction", "_finish", "32 vectors"): (
        {"next_ptr": X, "tower_ptr": X, "residual_ptr": X, "rstd_ptr": S}, {"D": 128, "NF": 32, "BF": 32, "BD": 128, "KEEP": True}, {"num_warps": 4},
    ),
    ("interaction", "_norm_gradient", "64 vectors"): (
        {"g_ptr": X, "next_ptr": X, "rstd_ptr": S, "ds_ptr": X}, {"D": 128, "ROWS": 64, "BR": 64, "BD": 128}, {"num_warps": 4},
    ),
    ("interaction", "_interact_gradient", "plain residual"): (
        BACKWARD, {"N": 64, **MIXED, "BN": 64, "PROJECT": False}, {"num_warps": 4, "num_stages": 3},
    ),
    ("interaction", "_interact_gradient", "projected residual"): (
        BACKWARD, {"N": 128, **MIXED, "BN": 128, "PROJECT": True}, {"num_warps": 8, "num_stages": 2},
    ),
}  # fmt: skip
WRITES_FP8 = {
    "_rows",
    "_tiles",
    "_both",
    "_grouped",
    "_forward",
    "_forward_both",
    "_backward_both",
    "_fused",
    "_finish",
    "_gradient",
    "_dgrad",
    "_interact",
}
MULTIPLIES = {"_gemm", "_fused", "_dgrad", "_interact", "_interact_gradient"}
DIVISIBLE = {"M", "N", "K", "stride_x", "stride_q", "stride_dy", "stride_z", "stride_g", "z_stride"}


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
    assert ("wgmma.mma_async" in ptx) == (name in MULTIPLIES)
    writes_fp8 = name in WRITES_FP8 and configuration[0] != "interaction"  # another op has a `_finish` too
    writes_fp8 |= configuration[0] == "interaction" and name in WRITES_FP8 - {"_finish"}
    assert bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2", ptx)) == writes_fp8


@pytest.mark.slow
@pytest.mark.parametrize(
    "configuration",
    [c for c in CONFIGURATIONS if c[0] == "quantize" and c[1] in ("_rows", "_tiles", "_both")],
    ids=" ".join,
)
def test_a_width_that_is_no_multiple_of_16_is_moved_by_vectors(configuration: tuple[str, str, str]) -> None:
    """5000 x 3000: rows of x start at multiples of 8 elements, rows of the results of 16 bytes."""
    op, name, _ = configuration
    types, constants, options = CONFIGURATIONS[configuration]
    compiled = compile_kernel(op, name, (types, {**constants, "ALIGN": 8}, options), {"stride_q"})
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert not re.search(r"ld\.global\.b16|st\.global\.b8", ptx)
    scalar = compile_kernel(op, name, (types, {**constants, "ALIGN": 1}, options), {"stride_q"}).asm["ptx"]
    assert "ld.global.b16" in scalar  # the assertion above can fail


@pytest.mark.slow
@pytest.mark.parametrize(("bm", "bn", "warps"), [(64, 64, 4), (64, 256, 4), (128, 128, 8), (128, 256, 8)])
def test_a_step_that_adds_up_columns_and_reads_no_z_fits(bm: int, bn: int, warps: int, own_cache: None) -> None:
    """The memory that a launch is said to need is at least what it takes; without the sums in it, 128 x 256 with four stages took 13 KiB more than a block has."""
    launch = Launch(bm, bn, 128, warps, 2)
    types = {**DGRAD, "g_desc": desc("fp8e4nv", bm, 128), "w_desc": desc("fp8e4nv", bn, 128), "q_desc": desc("fp8e4nv", bm, bn // 2), "qt_desc": desc("fp8e4nv", bn // 2, bm)}  # fmt: skip
    absent = dict.fromkeys(("z_desc", "z_ptr", "z_scale_ptr", "seed_ptr"))
    constants = {**STEP, **absent, "BM": bm, "BN": bn, "Z_BYTES": 0, "ACTIVATION": 0, "Z": 4}
    types = {name: kind for name, kind in types.items() if name not in absent}
    taken = compile_kernel("fused_linear", "_dgrad", (types, constants, {"num_warps": warps, "num_stages": 2}), DIVISIBLE)  # fmt: skip
    waiting = taken.metadata.shared - 2 * (bm + bn) * 128
    said = waiting_bytes(launch, Work(16384, 128, 1024, 1, 0, True, whole=True, sums=True))
    assert said >= waiting - 512  # barriers are counted elsewhere
    assert waiting_bytes(launch, Work(16384, 128, 1024, 1, 0, True, whole=True)) < waiting


@pytest.mark.slow
@pytest.mark.parametrize(("training", "drop"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("activation", ["relu", "silu", "hard_swish", "tanh", "gelu"])
def test_two_programs_fit_one_multiprocessor(activation: str, training: bool, drop: bool, own_cache: None, tmp_path: Path) -> None:  # fmt: skip
    """The launch that hides epilogues behind another program's products: both are resident, and spill no register; but for GELU, which is why it has another."""
    absent = dict.fromkeys(("z_desc", "part_desc", "rstd_ptr", "yts_ptr")) | ({} if training else {"yt_desc": None})
    types = {name: kind for name, kind in {**FUSED, "b_desc": desc("fp8e4nv", 128, 128)}.items() if name not in absent}
    constants = {**LAYER, **absent, "BN": 128, "HALVES": False, "NORM": False, "ACTIVATION": ACTIVATIONS.index(activation), "AMAX": training, "BIAS": True, "OUT": 1, "KEEP": 0, "TRANSPOSE": training, "DROP": drop}  # fmt: skip
    compiled = compile_kernel(
        "fused_linear", "_fused", (types, constants, {"num_warps": 4, "num_stages": 3}), DIVISIBLE
    )
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024  # what there is, and what the driver takes of it
    assert (stack_bytes(compiled.asm["cubin"], tmp_path) > 0) == (activation == "gelu")


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """What a thread keeps in memory for want of registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    (folder / "x.cubin").write_bytes(cubin)
    usage = subprocess.run([tool, "--dump-resource-usage", folder / "x.cubin"], capture_output=True, text=True, check=True).stdout  # fmt: skip
    return int(re.search(r"STACK:(\d+)", usage)[1])


@pytest.mark.parametrize("scale", ["SCALAR", "SQUARE"])
def test_a_matrix_of_one_column_compiles(scale: str, own_cache: None) -> None:
    """Where Triton may specialise a kernel for K = 1 it does, and ptxas (12.8, with Triton 3.6) crashes on what becomes of `_tiles`."""
    kernel = kernel_of("quantize", "_tiles")
    constants = {"BM": 32, "BK": 128, "ALIGN": 1, "SCALE": getattr(kernels_of("quantize"), scale), **ROUNDED}
    if not next(p for p in kernel.params if p.name == "K").do_not_specialize:
        constants["K"] = 1
    compiled = compile_kernel("quantize", "_tiles", (QUANTIZE, constants, {"num_warps": 4}), {"stride_q"})
    assert len(compiled.asm["cubin"]) > 0


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_that_is_launched_is_compiled_here(op: str) -> None:
    source = "\n".join(file.read_text() for file in files_of(op))
    launched = set(re.findall(r"^\s+(_\w+)\[\(|\bbind\(\s*(_\w+),", source, re.MULTILINE))
    launched = {at_once or bound for at_once, bound in launched}
    assert launched
    assert launched == {name for room, name, _ in CONFIGURATIONS if room == op}


def test_a_pipeline_too_deep_is_noticed(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound can fail: eight stages do not fit."""
    types, constants, _ = CONFIGURATIONS["scaled_mm", "_gemm", "row, fast"]
    monkeypatch.setitem(
        CONFIGURATIONS, ("scaled_mm", "_gemm", "deep"), (types, constants, {"num_warps": 8, "num_stages": 8})
    )
    assert build("scaled_mm", "_gemm", "deep").metadata.shared > SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(("n", "few"), [(64, 32), (64, 64), (128, 32), (128, 64)])
def test_the_interactions_launch_fits_whatever_is_supported(n: int, few: int, project: bool, own_cache: None) -> None:
    """Mixtures up to the most a call may have: fewer stages rather than more shared memory than there is."""
    kernels = kernels_of("interaction")
    sizes = {"N": n, "D": 128, "K": few, "NL": few, "NF": few, "BN": n, "BD": 128, "BK": few, "BL": few}
    common = {**sizes, "BLOCKS": 32, "PROJECT": project, "PROGRAMS": 264, "PREROUND": False}
    blocks = (n, 128, few, few)
    forward, _, _ = CONFIGURATIONS["interaction", "_interact", "plain residual"]
    for name, types, more, launch in (
        ("_interact", forward, {"BF": few, "KEEP": True}, kernels.forward_launch(*blocks, few, project=project)),
        ("_interact_gradient", BACKWARD, {"BO": 2 * few}, kernels.gradient_launch(*blocks, 2 * few, project=project)),
    ):
        compiled = compile_kernel("interaction", name, (types, {**common, **more}, launch), DIVISIBLE)
        assert compiled.metadata.shared <= SHARED_MEMORY, (name, launch)
