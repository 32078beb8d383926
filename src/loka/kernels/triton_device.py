"""Check where our Triton kernels run, in a form that torch.compile can trace.

Not part of `backend`, because the decorator below imports torch._dynamo and with it Triton, which `import loka.kernels`
must not do.
"""

import os
from functools import cache

import torch

from loka.kernels.backend import YES, Verdict, no, require_library

_NO_INTERPRETER = (
    "Triton needs a CUDA device; on the CPU only its interpreter runs (set TRITON_INTERPRET=1 before import)"
)


def triton_runs_on(device: torch.device) -> Verdict:
    """Check whether our FP8 kernels run here: on a GPU with FP8 tensor cores, or in Triton's interpreter on the CPU."""
    reason = _triton_refusal(device.type, -1 if device.index is None else device.index)
    return no(reason) if reason else YES


def triton_multiplies_on(device: torch.device, *, bf16: bool) -> Verdict:
    """Like `triton_runs_on`, for kernels without FP8: any GPU. `bf16`: they multiply bf16; the interpreter cannot."""
    reason = _plain_refusal(device.type, bf16)
    return no(reason) if reason else YES


def _require_triton(kind: str) -> Verdict:
    """Check whether Triton can be imported. On a CPU without it, installing it would not help, so the device is the reason."""
    available = require_library("triton", "dev")
    return (
        no(_NO_INTERPRETER) if not available and kind == "cpu" and "TRITON_INTERPRET" not in os.environ else available
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _plain_refusal(kind: str, bf16: bool) -> str:
    available = _require_triton(kind)
    if not available or kind == "cuda":
        return available.reason
    import triton

    if kind == "cpu" and triton.knobs.runtime.interpret:
        return "Triton's interpreter multiplies bf16 by its bit patterns; test in fp16 or fp32" if bf16 else ""
    return f"Triton needs a CUDA device, not {kind} (on the CPU only its interpreter runs: TRITON_INTERPRET=1)"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _triton_refusal(kind: str, index: int) -> str:
    """Return the reason or "". A string, so that torch.compile takes it as a constant and traces no import."""
    return _find_triton_refusal(kind, index)


@cache
def _find_triton_refusal(kind: str, index: int) -> str:
    available = _require_triton(kind)
    if not available:
        return available.reason
    if kind == "cpu":
        import triton

        return "" if triton.knobs.runtime.interpret else _NO_INTERPRETER
    if kind != "cuda":
        return f"Triton needs a CUDA device, not {kind}"
    if not torch.cuda.is_available():
        return "Triton needs a CUDA device, and this machine has none"
    major, minor = torch.cuda.get_device_capability(None if index < 0 else index)
    if (major, minor) < (8, 9):
        return f"FP8 needs compute capability 8.9 or newer, this GPU has {major}.{minor}"
    return ""
