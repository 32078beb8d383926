"""The kernels of dots, of mixed_dots and of amax_history compile for Hopper (sm_90) on a machine without a GPU, with tensor cores for 16 bits and within its memory."""

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

from kernels.hopper import SHARED_MEMORY, compile_kernel, needs_ptxas  # noqa: E402

pytestmark = needs_ptxas


@pytest.mark.parametrize("kernel", ["_dots", "_dots_gradient"])
@pytest.mark.parametrize(("kind", "n", "d"), [("bf16", 32, 128), ("fp16", 64, 512), ("fp32", 32, 128)])
def test_compiles_for_hopper(kernel: str, kind: str, n: int, d: int) -> None:
    types = {"x_ptr": f"*{kind}", "place_ptr": "*i32"}
    types |= {"y_ptr": f"*{kind}"} if kernel == "_dots" else {"dy_ptr": f"*{kind}", "dx_ptr": f"*{kind}"}
    constants = {"N": n, "D": d, "WIDE": kind == "fp32"}
    if kernel == "_dots":  # with vectors that lie elsewhere: the larger of the two
        types["head_ptr"], constants["HEAD"] = f"*{kind}", True
    made = compile_kernel("dots", kernel, (types, constants, {"num_warps": 2 if n <= 32 else 4}), {"d"})
    assert made.metadata.shared <= SHARED_MEMORY
    ptx = made.asm["ptx"]
    assert ".target sm_90" in ptx
    if kind != "fp32":
        assert "mma" in ptx


def test_the_table_of_places_compiles_for_hopper() -> None:
    types = {"first_ptr": "*i64", "second_ptr": "*i64", "place_ptr": "*i32"}
    made = compile_kernel("dots", "_places", (types, {"SIZE": 4096}, {"num_warps": 8}), set())
    assert "bar.sync" in made.asm["ptx"]


@pytest.mark.parametrize("longest", [1, 16, 4096])
def test_magnitudes_are_filed_with_a_rounded_quotient(longest: int) -> None:
    constants = {"MAX": 448.0, "SMALLEST": 2.0**-126, "LONGEST": longest}
    made = compile_kernel("amax_history", "_file", ({"table_ptr": "*i64"}, constants, {"num_warps": 1}), set())
    assert "div.rn.f32" in made.asm["ptx"]


@pytest.mark.parametrize("kernel", ["_forward", "_gradient"])
@pytest.mark.parametrize(
    ("kind", "n", "d", "k", "m"),
    [
        ("bf16", 64, 128, 24, 0),
        ("bf16", 128, 128, 64, 0),
        ("fp16", 128, 256, 64, 0),
        ("bf16", 64, 128, 24, 32),
        ("bf16", 128, 128, 64, 128),
        ("bf16", 64, 256, 32, 128),
        ("fp16", 16, 256, 16, 128),
    ],
)
def test_products_with_mixtures_compile_for_hopper(kernel: str, kind: str, n: int, d: int, k: int, m: int) -> None:
    from loka.kernels.mixed_dots import triton_kernels

    read = {"x_ptr", "weight_ptr", "mixing_ptr", *(("dp_ptr", "dz_ptr") if kernel == "_gradient" else ())}
    written = {"dx_ptr"} if kernel == "_gradient" else {"out_ptr", "mixed_ptr"}
    types = dict.fromkeys(read | written, f"*{kind}")
    if kernel == "_gradient":
        types |= {"dw_ptr": "*fp32", "dv_ptr": "*fp32"}
    found = triton_kernels.launch_options(n, d, k, m, gradient=kernel == "_gradient")
    assert found is not None
    _, warps, stages = found
    constants = {"N": n, "D": d, "K": k, "M": m, "BN": n, "BD": d, "BK": triton_kernels._padded(k), "BM": triton_kernels._padded(m), "PREROUND": False}  # fmt: skip
    made = compile_kernel("mixed_dots", kernel, (types, constants, {"num_warps": warps, "num_stages": stages}), set())
    assert made.metadata.shared <= SHARED_MEMORY
    assert "mma" in made.asm["ptx"]
