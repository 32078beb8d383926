"""The norms of chains compile for Hopper (sm_90) on a machine without a GPU, for every activation, as their launchers choose them at 6144 x 3072."""

import re
from typing import Any

import pytest

pytest.importorskip("triton", exc_type=ImportError)

from kernels.hopper import SHARED_MEMORY, compile_kernel, needs_ptxas
from loka.kernels.activation import ACTIVATIONS

pytestmark = needs_ptxas

X, Q, S = "*bf16", "*fp8e4nv", "*fp32"
DIVISIBLE = {"M", "K", "stride_x", "stride_dy", "stride_q", "stride_h", "stride_r", "words"}
COMMON = {
    "w_ptr": X,
    "b_ptr": X,
    "s_ptr": S,
    "mean_ptr": S,
    "rstd_ptr": S,
    "amax_ptr": S,
    "xs_ptr": S,
    "seed_ptr": "*i64",
    "upscale": "fp32",
}
FORWARD = {**COMMON, "made_ptr": S, "x_ptr": X, "q_ptr": Q, "qt_ptr": "*i32", "eps": "fp32"}
BACKWARD = {**COMMON, "dy_ptr": X, "x_ptr": X, "dx_ptr": Q, "dxt_ptr": "*i32", "dw_ptr": S, "db_ptr": S}
TILE = {
    "ROWS": 16,
    "NORM": 0,
    "WEIGHT": True,
    "BIAS": True,
    "E5M2": False,
    "AMAX": True,
    "ALIGN": 16,
    "DROP": False,
    "PREROUND": False,
}
ROWS = {
    **COMMON, "made_ptr": S, "x_ptr": Q, "r_ptr": X, "h_ptr": X, "q_ptr": Q, "y_ptr": X, "head_ptr": X, "dots_ptr": S, "eps": "fp32",
}  # fmt: skip
ALONE = {
    "ROWS": 1, "WIDE": 2048, "REST": 1024, "NORM": 0, "WEIGHT": True, "BIAS": True, "RESIDUAL": False, "OUT": True, "SCALE": 0, "E5M2": False, "POW2": False,
    "X_SCALE": 1, "AMAX": True, "FULL": True, "EVEN": True, "ALIGN": 16, "DROP": False, "HEADS": 2, "STAGES": 3, "PREROUND": False,
}  # fmt: skip


def build(name: str, types: dict[str, str], constants: dict[str, Any], file: str = "triton_both") -> Any:
    return compile_kernel("norm_quantize", name, (types, constants, {"num_warps": 8}), DIVISIBLE, file)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_compiles_with_every_activation(activation: str) -> None:
    tile = {**TILE, "BK": 512, "X_SCALE": 0, "ACTIVATION": ACTIVATIONS.index(activation)}
    compiled = build("_forward_both", FORWARD, tile)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2", compiled.asm["ptx"])
    assert "st.local" not in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("kept", "source"), [(X, 0), (Q, 1), (Q, 2)])
def test_backward_compiles_from_16_bits_and_from_fp8(activation: str, kept: str, source: int) -> None:
    tile = {**TILE, "BK": 512, "X_SCALE": source, "ACTIVATION": ACTIVATIONS.index(activation)}
    compiled = build("_backward_both", {**BACKWARD, "x_ptr": kept}, tile)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2", compiled.asm["ptx"])


@pytest.mark.slow
def test_sixteen_bits_from_fp8_compile() -> None:
    compiled = build("_forward", ROWS, {**ALONE, "ACTIVATION": ACTIVATIONS.index("gelu_tanh")}, "triton_kernels")
    assert "satfinite" not in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "types"), [("_forward_both", FORWARD), ("_backward_both", BACKWARD)])
def test_a_width_that_is_no_multiple_of_16_is_moved_by_vectors(name: str, types: dict[str, str]) -> None:
    tile = {**TILE, "BK": 512, "X_SCALE": 0, "ACTIVATION": 2, "ALIGN": 8}
    ptx = compile_kernel("norm_quantize", name, (types, tile, {"num_warps": 8}), {"stride_q"}, "triton_both").asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert re.search(r"st\.global\.v[24]\.b32", ptx)
    assert not re.search(r"st\.global\.b8", ptx)
