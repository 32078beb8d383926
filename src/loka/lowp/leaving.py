"""Raise helpful errors for exporters, transforms, second derivatives and dtypes that converted modules do not support."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

TWICE = "cannot be differentiated again"  # part of the message about second derivatives
_HINT = (
    "hint: loka.export(model, example, 'model.onnx') or 'model.pt2' writes a frozen model that does not need this "
    "library; loka.revert(model) restores the original"
)


def refuse_script(name: str) -> NoReturn:
    """Raise for torch.jit.script and torch.jit.trace, which cannot compile the code of a converted module."""
    raise ValueError(f"{name or 'a linear'} is converted: TorchScript cannot compile it; {_HINT}")


def refuse_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    """Raise for an input whose dtype no low-precision GEMM writes, such as that of a model after `model.double()`."""
    raise ValueError(
        f"{name or 'a linear'} is converted and its input is {dtype}: no low-precision GEMM writes that; hint: "
        "loka.revert(model) first, or an input in float32, bfloat16 or float16"
    )


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an autograd function raise if its result is to be differentiated, or computed in batches.

    `once_differentiable` of torch raises only if a second backward reaches the function from its result. One that takes
    another way, as those of `torch.autograd.functional` do, would take its second derivative for zero.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():  # only with create_graph=True
                raise RuntimeError(
                    f"the gradient of a converted linear {TWICE}, as create_graph=True asks (for a gradient penalty, "
                    "a Hessian): low precision has no second derivative; hint: loka.revert(model) first, or "
                    "create_graph=False where none is needed; loka.tune(step=...) leaves such linears in high precision"
                )
            if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
                raise ValueError(
                    "the gradient of a converted linear is taken for several vectors at once (is_grads_batched=True, "
                    "vectorize=True), for which its kernels have no rules; hint: loka.revert(model) first, or one "
                    "vector at a time"
                )
        return backward(ctx, *grads)

    return run


def refuse_tracing(converted: Any) -> None:
    """Raise during exports, torch.jit.trace and the transforms of torch.func, which would fail later obscurely.

    It takes the object and not its name, because torch 2.11 recompiles for every name that is read.
    """
    if _is_exporting():
        raise ValueError(
            f"{converted.name or 'a linear'} is converted: torch.onnx.export and torch.export do not support its "
            f"scales and casts; {_HINT}"
        )
    if torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace
        refuse_script(converted.name)
    if torch._C._functorch.peek_interpreter_stack() is not None:
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
