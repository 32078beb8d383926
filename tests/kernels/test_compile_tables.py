"""The Triton kernels of embedding tables compile for Hopper (sm_90) on a machine without a GPU, as `test_compile_hopper` does for the others."""

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

from kernels.hopper import SHARED_MEMORY, compile_kernel, kernels_of, needs_ptxas  # noqa: E402

pytestmark = needs_ptxas

S, J, L = "*fp32", "*i32", "*i64"
TYPES = {"float32": S, "bfloat16": "*bf16", "int8:row": "*i8", "e4m3:row:pow2": "*fp8e4nv", "int4:row": "*u8"}
LOOKUP = {
    "scale_ptr": S,
    "slot_ptr": J,
    "hot_ptr": S,
    "index_ptr": L,
    "offset_ptr": L,
    "weight_ptr": S,
    "out_ptr": "*bf16",
}
UPDATE = {
    "scale_ptr": S, "slot_ptr": J, "hot_ptr": S, "sorted_ptr": L, "order_ptr": L, "bag_ptr": J, "factor_ptr": S, "grad_ptr": "*bf16",
    "m_ptr": S, "v_ptr": S, "lr": "fp32", "eps": "fp32", "beta1": "fp32", "beta2": "fp32", "c1": "fp32", "c2": "fp32", "seed": "i64",
    "first_row": "i64",
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("name", "width", "hot"), [("_pool", 128, False), ("_pool", 256, True), ("_take", 64, False)])
def test_lookups_compile(kind: str, name: str, width: int, hot: bool) -> None:
    bytes_ = {"float32": 4, "bfloat16": 2}.get(kind, 1)
    u, bd, warps = kernels_of("embedding_bag").tile_of(width, bytes_)
    constants = {"SCALED": ":" in kind, "HOT": hot, "INT4": kind == "int4:row", "WEIGHTED": hot, "U": u, "BD": bd}
    types = {key: value for key, value in LOOKUP.items() if name == "_pool" or key != "offset_ptr"}
    if name == "_pool":
        constants["MEAN"] = False
    built = compile_kernel(
        "embedding_bag", name, ({**types, "data_ptr": TYPES[kind]}, constants, {"num_warps": warps}), {"D"}
    )
    assert built.metadata.shared <= SHARED_MEMORY
    if kind in ("bfloat16", "int8:row", "e4m3:row:pow2") and not hot:
        assert "ld.global.v4" in built.asm["ptx"] or "ld.global.v2" in built.asm["ptx"], (
            "rows are not read in wide loads"
        )


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "int4:row"])
@pytest.mark.parametrize(("rule", "hot"), [(1, False), (2, True)])
def test_updates_compile(kind: str, rule: int, hot: bool) -> None:
    number = kernels_of("embedding_update").KINDS[kind]
    constants = {"KIND": number, "RULE": rule, "HOT": hot, "BAGS": True, "FACTOR": hot, "DUP": 4, "BD": 128}
    built = compile_kernel(
        "embedding_update", "_update", ({**UPDATE, "data_ptr": TYPES[kind]}, constants, {"num_warps": 1}), {"D"}
    )
    assert built.metadata.shared <= SHARED_MEMORY
    if number >= 1:
        products = built.asm["ptx"].count("mul.hi.u32") + built.asm["ptx"].count("mul.wide.u32")
        assert products > 0, "no random numbers are drawn"
