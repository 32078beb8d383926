"""Raise helpful errors for exporters, transforms and dtypes that converted modules do not support."""

from typing import Any, NoReturn

import torch

_HINT = (
    "hint: loka.export(model, example, 'model.onnx') or 'model.pt2' writes a frozen model that does not need this "
    "library; loka.revert(model) restores the original"
)


def refuse_script(name: str) -> NoReturn:
    """Raise for torch.jit.script, which cannot compile the code of a converted module."""
    raise ValueError(f"{name or 'a linear'} is converted: TorchScript cannot compile it; {_HINT}")


def refuse_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    """Raise for an input whose dtype no low-precision GEMM writes, such as that of a model after `model.double()`."""
    raise ValueError(
        f"{name or 'a linear'} is converted and its input is {dtype}: no low-precision GEMM writes that; hint: "
        "loka.revert(model) first, or an input in float32, bfloat16 or float16"
    )


def refuse_tracing(converted: Any) -> None:
    """Raise during torch.onnx.export, torch.export and the transforms of torch.func, which would fail later obscurely.

    It takes the object and not its name, because torch 2.11 recompiles for every name that is read.
    """
    if _is_exporting():
        raise ValueError(
            f"{converted.name or 'a linear'} is converted: torch.onnx.export and torch.export do not support its "
            f"scales and casts; {_HINT}"
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise ValueError(
            f"{converted.name or 'a linear'} is converted: its kernels, scales and cached weights have no rules for the "
            "transforms of torch.func (grad, vjp, jvp, vmap, jacrev, ...); hint: loka.revert(model) first, or "
            "loss.backward() and torch.autograd.grad; torch.func.functional_call by itself works"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Check for an export.

    Not traced, because torch 2.11's compiler takes `is_exporting()` for True in any compilation.
    """
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()
