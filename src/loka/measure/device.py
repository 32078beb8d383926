"""Describe the machine for records (`snapshot`), and measure its peak rates for rooflines (`peaks`).

`snapshot` only reads. `peaks` measures in the same run as the kernels that are compared with it: a large copy, counting
bytes read plus bytes written, and large library GEMMs on random data (zeros run faster).
"""

import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from loka.formats import E4M3, TENSOR, Spec
from loka.kernels import registry
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure.conformance import Conformance
from loka.measure.inputs import draw, matmul_operands
from loka.measure.timing import Contender, time_together
from loka.records import Environment, capture_environment
from loka.records.performance import Peaks


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def name_device(device: torch.device) -> str:
    """Return a device's name as used in records: the product name of a GPU, otherwise the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment_of(model: nn.Module, command: str | None = None) -> Environment:
    """Describe the environment of measurements on a model. `command` is this process's own if None."""
    return capture_environment(command=command, device=name_device(device_of(model)), threads=torch.get_num_threads())


def snapshot(command: str | None = None) -> Environment:
    """Describe the environment of measurements in this process, including the GPU and its driver if there is one.

    Args:
        command: the command that was run; None for this process's own.

    Returns:
        The environment, to be stored with every measurement.

    Example:
        >>> snapshot().device
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made = capture_environment(command=command, device=name, driver=_find_driver(), threads=torch.get_num_threads())
    # torch's version with its build, e.g. 2.11.0+cu128; loka is imported by name since it imports rooms above this one
    return msgspec.structs.replace(made, torch=str(torch.__version__), loka=import_module("loka").__version__)


def _find_driver() -> str | None:
    """Return the NVIDIA driver's version from the kernel module, without CUDA."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return _query_driver()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _query_driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def peaks(device: torch.device | str, *, repeats: int = 9) -> Peaks:
    """Measure the peak rates of a device: small problems on a CPU, problems that fill the chip on a GPU."""
    device = torch.device(device)
    big = device.type == "cuda"
    bytes_moved, copy = _time_copy(1 << (31 if big else 22), device, repeats)
    size = 8192 if big else 256
    x = draw(size, size, seed=1, device=device, dtype=torch.bfloat16)
    w = draw(size, size, seed=2, device=device, dtype=torch.bfloat16)
    bf16 = _time_seconds("bf16 GEMM", lambda: x @ w.T, device, repeats)
    flops = 2.0 * size**3
    fp8 = _time_fp8(size, device, repeats)
    return Peaks(
        copy_bytes_per_second=bytes_moved / copy,
        bf16_flops=flops / bf16,
        fp8_flops=None if fp8 is None else flops / fp8,
    )


def _time_copy(elements: int, device: torch.device, repeats: int) -> tuple[int, float]:
    """Return the bytes read and written by one large copy, and its seconds.

    The copy is a kernel: `copy_` in a CUDA graph is none, and moves 2.7 instead of 4.2 TB/s on an H200.
    """
    source = torch.empty(elements, dtype=torch.bfloat16, device=device).bernoulli_()  # not zeros, which may run faster
    target = torch.empty_like(source)
    return 2 * source.nbytes, _time_seconds("copy", lambda: torch.neg(source, out=target), device, repeats)


def _time_fp8(size: int, device: torch.device, repeats: int) -> float | None:
    """Time the library's tensorwise FP8 GEMM; None if the device does not support it."""
    spec = Spec(E4M3, TENSOR)
    call = MatmulCall(size, size, size, spec, spec, fast_accum=True)
    library = registry.backend("scaled_mm", "torch")
    if not library.supports(call, device):
        return None
    a, b = matmul_operands(call, device=device)
    return _time_seconds(
        "FP8 GEMM", lambda: library.run(a, b, out_dtype=call.out_dtype, fast_accum=True), device, repeats
    )


def _time_seconds(name: str, thunk: Callable[[], Any], device: torch.device, repeats: int) -> float:
    trusted = Conformance(True, 0.0, 0.0)  # only the rate matters, not the result
    (timing,) = time_together([Contender(name, [thunk], trusted)], device, repeats=repeats)
    return timing.microseconds().value * 1e-6
