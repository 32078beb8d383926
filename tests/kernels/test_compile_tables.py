"""The Triton kernels of embedding tables compile for Hopper (sm_90) on a machine without a GPU, as `test_compile_hopper` does for the others."""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

from kernels.hopper import SHARED_MEMORY, compile_kernel, kernels_of, needs_ptxas  # noqa: E402

pytestmark = needs_ptxas

S, J, L = "*fp32", "*i32", "*i64"
TYPES = {"float32": S, "bfloat16": "*bf16", "int8:row": "*i8", "e4m3:row:pow2": "*fp8e4nv", "int4:row": "*u8"}
LOOKUP = {
    "scale_ptr": "*u8",
    "slot_ptr": J,
    "hot_ptr": S,
    "index_ptr": L,
    "offset_ptr": L,
    "weight_ptr": S,
    "out_ptr": "*bf16",
}
UPDATE = {
    "scale_ptr": "*u8", "slot_ptr": J, "hot_ptr": S, "sorted_ptr": J, "source_ptr": J, "factor_ptr": S, "grad_ptr": "*bf16", "chunk_ptr": S,
    "m_ptr": S, "v_ptr": S, "lr": "fp32", "eps": "fp32", "beta1": "fp32", "beta2": "fp32", "c1": "fp32", "c2": "fp32", "seed": "i64",
    "first_row": "i64",
}  # fmt: skip


def registers_of(built: Any) -> int:
    """What ptxas gives a thread."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        said = subprocess.run(
            [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr  # fmt: skip
    assert " 0 bytes spill stores" in said
    return int(said.split("Used ")[1].split()[0])


def instructions_of(built: Any) -> int:
    """In the machine code of a kernel."""
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not disassembler.exists():
        pytest.skip("Triton's bundled cuobjdump is missing: instructions cannot be counted")
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run([disassembler, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return sum(1 for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?!NOP)\S", line))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("name", "width", "hot"), [("_pool", 128, False), ("_pool", 256, True), ("_take", 64, False)])
def test_lookups_compile(kind: str, name: str, width: int, hot: bool) -> None:
    bytes_ = {"float32": 4, "bfloat16": 2}.get(kind, 1)
    u, g, bd, warps = kernels_of("embedding_bag").tile_of(width, 0.5 if kind == "int4:row" else bytes_)
    stride = width // 2 if kind == "int4:row" else width
    constants = {
        "D": width, "STRIDE": stride, "STEP": 1,
        "SCALED": ":" in kind, "HOT": hot, "INT4": kind == "int4:row", "BD": bd,
    }  # fmt: skip
    types = {key: value for key, value in LOOKUP.items() if name == "_pool" or key not in ("offset_ptr", "weight_ptr")}
    if name == "_pool":
        constants |= {"WEIGHTED": hot, "MEAN": False, "U": u, "G": g}
    else:
        constants["R"] = u * g
    built = compile_kernel(
        "embedding_bag", name, ({**types, "data_ptr": TYPES[kind]}, constants, {"num_warps": warps}), set()
    )
    assert built.metadata.shared <= SHARED_MEMORY
    item = int(g * bd * (0.5 if kind == "int4:row" else bytes_)) // (32 * warps)  # bytes that a thread reads of an item
    widest = min(16, item if name == "_pool" else u * item)
    loads = built.asm["ptx"].count({4: "ld.global.b32", 8: "ld.global.v2.b32", 16: "ld.global.v4.b32"}[widest])
    assert loads >= u * item // widest, "rows are not read in the widest vectors, all items at once"
    single = [line for line in built.asm["ptx"].splitlines() if "ld.global" in line and ".b8 " in line]
    # a row's scale is the only byte that is read alone, and once: not once for every value that a thread holds
    assert len(single) <= u * (":" in kind)
    assert built.asm["ptx"].count("shfl.sync") < 100, "a bag is added up across threads"
    if name == "_pool" and not hot:
        # int4: a thread holds the sums of 32 values instead of 16
        assert registers_of(built) <= (176 if kind == "int4:row" else 144), "what waits for memory is kept as floats"


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "int4:row"])
@pytest.mark.parametrize(("rule", "hot"), [(1, False), (2, True)])
def test_updates_compile(kind: str, rule: int, hot: bool) -> None:
    number = kernels_of("embedding_update").KINDS[kind]
    g, bd, warps = kernels_of("embedding_update").tile_of(128)
    constants = {
        "D": 128,
        "STRIDE": 128,
        "STEP": 1,
        "KIND": number,
        "RULE": rule,
        "HOT": hot,
        "FACTOR": hot,
        "CHUNK": 256,
        "DUP": 2,
        "G": g,
        "BD": bd,
    }
    built = compile_kernel(
        "embedding_update", "_update", ({**UPDATE, "data_ptr": TYPES[kind]}, constants, {"num_warps": warps}), set()
    )
    assert built.metadata.shared <= SHARED_MEMORY
    if number >= 1:
        products = built.asm["ptx"].count("mul.hi.u32") + built.asm["ptx"].count("mul.wide.u32")
        assert products > 0, "no random numbers are drawn"


@pytest.mark.parametrize("width", [32, 256])
def test_sums_of_long_runs_compile(width: int) -> None:
    types = {"sorted_ptr": J, "source_ptr": J, "factor_ptr": S, "grad_ptr": "*bf16", "chunk_ptr": S}
    constants = {"D": width, "FACTOR": False, "CHUNK": 256, "R": 2048 // width, "BD": width}
    built = compile_kernel("embedding_update", "_sum_chunks", (types, constants, {"num_warps": 4}), set())
    assert built.metadata.shared <= SHARED_MEMORY
    assert registers_of(built) <= 128


@pytest.mark.parametrize("byte_scale", [False, True])
def test_the_wire_unpacks(byte_scale: bool) -> None:
    block = 32 if byte_scale else 128
    constants = {"B": block, "E5M2": False, "BYTE_SCALE": byte_scale, "R": 4096 // block, "LARGEST": 3.3e38}
    types = {"data_ptr": "*u8", "out_ptr": "*bf16"}
    ptx = compile_kernel("wire", "_unpack", (types, constants, {"num_warps": 4}), set()).asm["ptx"]
    assert "st.global.v4.b32" in ptx
    if not byte_scale:
        assert ".global.b8" not in ptx, "codes travel byte by byte"


PACKING = [  # an H200 copies in the time of 21 instructions per element from bf16, and of 35 from float32
    ("*bf16", 128, "nearest", 8), ("*fp32", 128, "nearest", 10), ("*bf16", 32, "nearest", 10), ("*fp32", 32, "nearest", 12),
    ("*bf16", 128, "stochastic", 18), ("*fp32", 128, "stochastic", 20), ("*bf16", 32, "stochastic", 20), ("*bf16", 32, "e5m2", 13),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "block", "rounding", "most"), PACKING)
def test_packing_takes_few_instructions_and_writes_words(dtype: str, block: int, rounding: str, most: int) -> None:
    elements = kernels_of("wire").TILE_BYTES // (2 if dtype == "*bf16" else 4)
    constants = {
        "B": block, "E5M2": rounding == "e5m2", "POW2": True, "BYTE_SCALE": block == 32, "STOCHASTIC": rounding == "stochastic",
        "R": elements // block,
    }  # fmt: skip
    types = {"x_ptr": dtype, "out_ptr": J}  # a seed and a block in 32 bits
    built = compile_kernel("wire", "_pack", (types, constants, {"num_warps": 1}), set())
    assert "ld.global.v4.b32" in built.asm["ptx"]
    assert not {"st.global.b8", "st.global.b16"} & set(built.asm["ptx"].split()), "bytes are stored one by one"
    assert registers_of(built) <= 128
    assert instructions_of(built) <= most * elements / 32
