"""Compile a Triton kernel for Hopper (sm_90) without a GPU; for the tests that prove code where the interpreter proves values."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", exc_type=ImportError)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED_MEMORY = 232448  # bytes a block may use on an H100 or H200
# pointer types, compile-time constants, launch options
Configuration = tuple[dict[str, str], dict[str, Any], dict[str, Any]]

needs_ptxas = [
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="Triton interprets in this process"),
    pytest.mark.skipif(
        not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(),
        reason="Triton's bundled ptxas is missing: nothing can be compiled for sm_90",
    ),
]


def kernels_of(op: str, file: str = "triton_kernels") -> Any:
    return import_module(f"loka.kernels.{op}.{file}")


def files_of(op: str) -> list[Path]:
    """Every file of an op that has kernels."""
    folder = Path(kernels_of(op).__file__).parent
    return sorted([*folder.glob("triton*kernels.py"), *folder.glob("triton_both.py")])


def kernel_of(op: str, name: str) -> Any:
    """A kernel by its name, from whichever file of the op has it."""
    modules = [import_module(f"loka.kernels.{op}.{file.stem}") for file in files_of(op)]
    found = next(getattr(module, name) for module in modules if hasattr(module, name))
    return getattr(found, "jitted", found)  # of what `quick` launches


def compile_kernel(
    op: str, name: str, configuration: Configuration, divisible: set[str], file: str | None = None
) -> Any:
    """`divisible`: integer arguments that launchers pass as multiples of 16."""
    kernel = kernel_of(op, name) if file is None else getattr(kernels_of(op, file), name)
    kernel = getattr(kernel, "jitted", kernel)
    types, constants, options = configuration
    names = kernel.arg_names
    assert set(types) | set(constants) <= set(names), "the configuration names arguments the kernel no longer has"
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in names}
    aligned = [
        i
        for i, arg in enumerate(names)
        if signature[arg].startswith("*") or (arg in divisible and arg not in constants)
    ]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(arg),): value for arg, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
