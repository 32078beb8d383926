"""Precision of a run: fp32, tf32 or bf16, exactly as requested or an error.

    fp32   float32 everywhere; matrix products in full float32 (TF32 is switched off, whatever was set)
    tf32   float32 storage; CUDA matrix products round their operands to 10 mantissa bits. Needs Ampere or newer
    bf16   autocast: float32 master weights and optimizer state, bfloat16 matrix products and activations

There is no loss scaling: bfloat16 has float32's exponent range, so gradients do not underflow as in float16. The
process-wide matmul setting is restored when the run ends.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from loka.training.config import PrecisionName


def resolve_device(name: str) -> torch.device:
    """Return the device of a name: `auto` is the GPU if there is one; any other device must exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}; expected auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no CUDA GPU; use device='cpu' or 'auto'")
    return device


def check_precision(name: PrecisionName, device: torch.device) -> None:
    """Raise ValueError, with the reason, if this device does not support the precision."""
    if name == "tf32":
        if device.type != "cuda":
            raise ValueError(f"precision 'tf32' exists on CUDA GPUs only, the run is on {device.type!r}; use 'fp32'")
        if torch.cuda.get_device_capability(device)[0] < 8:
            raise ValueError(f"precision 'tf32' needs compute capability 8.0, {_name(device)}; use 'fp32'")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"precision 'bf16' needs compute capability 8.0, {_name(device)}; use 'fp32'")


@contextmanager
def precision_scope(name: PrecisionName, device: torch.device) -> Iterator[None]:
    """Set the float32 matmul mode for the run and restore the caller's afterwards."""
    check_precision(name, device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(name: PrecisionName, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of one forward pass."""
    if name == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _name(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
