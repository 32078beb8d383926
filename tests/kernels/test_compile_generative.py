"""The Triton kernels of generative inference compile for Hopper (sm_90) on a machine without a GPU, as `test_compile_hopper` does for the others."""

import re
from importlib import import_module
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHARED_MEMORY = 232448  # bytes a block may use on an H100 or H200
REGISTERS = 65536  # of a multiprocessor

pytestmark = [
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="Triton interprets in this process"),
    pytest.mark.skipif(
        not PTXAS.exists(), reason="Triton's bundled ptxas is missing: nothing can be compiled for sm_90"
    ),
]

S, I, L, X = "*fp32", "*i32", "*i64", "*bf16"
SOURCE = {"x_ptr": S, "mask_ptr": "*i8", "score_ptr": S, "lse_ptr": S}
MAXIMA = {**SOURCE, "first_ptr": I, "second_ptr": I}
SELECT = {**SOURCE, "parent_ptr": I, "id_ptr": I, "key_ptr": I}

# op, kernel, what it is tried as: (pointer types, compile-time constants, launch options)
CONFIGURATIONS = {
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
        {**SELECT, "x_ptr": I},
        {"HIGH": 128, "C": 32, "FIRST": True, "KIND": 0, "MASKED": False, "KP": 512},
        {"num_warps": 8},
    ),
    ("topk", "_rank", "sorted"): (
        {"id_ptr": I, "key_ptr": I, "value_ptr": S, "beam_ptr": L, "index_ptr": L},
        {"SORTED": True, "BEAM": True, "BI": 32, "BJ": 256},
        {"num_warps": 4},
    ),
}
MULTIPLIES: set[str] = set()
WRITES_FP8: set[str] = set()
DIVISIBLE = {"M", "N", "K", "W", "W1", "stride", "mask_stride"}


def kernels_of(op: str):
    return import_module(f"loka.kernels.{op}.triton_kernels")


def build(op: str, name: str, what: str):
    kernel = getattr(kernels_of(op), name)
    types, constants, options = CONFIGURATIONS[op, name, what]
    names = kernel.arg_names
    assert set(types) | set(constants) <= set(names), "the configuration names arguments the kernel no longer has"
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in names}
    aligned = [
        i
        for i, arg in enumerate(names)
        if signature[arg].startswith("*") or (arg in DIVISIBLE and arg not in constants)
    ]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(arg),): value for arg, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


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
    assert bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2", ptx)) == (name in WRITES_FP8)


@pytest.mark.parametrize("op", sorted({op for op, _, _ in CONFIGURATIONS}))
def test_every_kernel_that_is_launched_is_compiled_here(op: str) -> None:
    source = Path(kernels_of(op).__file__).read_text()
    launched = set(re.findall(r"^\s+(_\w+)\[\(", source, re.MULTILINE))
    assert launched
    assert launched == {name for room, name, _ in CONFIGURATIONS if room == op}
