"""Run a package in its own process, which imports torch but not loka, as in production. It may crash without harm."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loka.exporting.signature import flatten_result

PATIENCE = 900.0  # seconds for one call, including the start of the process; a package that takes longer hangs
# Every line on stdin names a file of inputs; the results go to a file next to it. Anything else written to stdout goes
# to stderr, so that it is not taken for an answer.
_CHILD = """
import faulthandler, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import torch
faulthandler.enable()
run = torch._inductor.aoti_load_package(sys.argv[1], device_index=int(sys.argv[2]))
for line in sys.stdin:
    name = line.rstrip("\\n")
    with torch.no_grad():
        torch.save(run(*torch.load(name)), name + ".out")
        print("done", file=answers, flush=True)
"""


class Tried:
    """A package that runs in another process, until it is closed. Inputs and results are written next to it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.calls, self.late = path, 0, False
        self.said = (path.parent / "said.txt").open("w+")
        index = device.index if device.type == "cuda" and device.index is not None else -1
        # it runs in another folder and must find the same torch as this process
        found = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        self.child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path), str(index)], env={**os.environ, "PYTHONPATH": found},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, cwd=path.parent,
        )  # fmt: skip

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the package; returns the flattened results. If it fails, ValueError has its last line of output."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.calls += 1
        given = self.path.parent / f"inputs{self.calls}.pt"
        torch.save([_alone(tensor) for tensor in tensors], given)
        try:
            self.child.stdin.write(f"{given}\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; reported below
        end = threading.Timer(PATIENCE, self._give_up)
        end.daemon = True
        end.start()
        try:
            answer = self.child.stdout.readline().strip()
        finally:
            end.cancel()
        if answer != "done":
            raise ValueError(self._why())
        return flatten_result(torch.load(f"{given}.out", weights_only=False))  # written by the process above

    def _give_up(self) -> None:
        self.late = True
        self.child.kill()

    def _why(self) -> str:
        code = self.child.wait()
        if self.late:
            return f"the package gave no answer within {PATIENCE:g} s; nothing was written; hint: a smaller example"
        self.said.seek(0)
        words = [line.strip() for line in self.said if line.strip()]
        where = next((line for line in words if line.startswith("File ")), "")
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        last = where if code < 0 else (words[-1] if words else "no output")
        hint = "format='onnx', or another version of torch"
        if code < 0 and has_own_libstdcxx(self.path):
            hint = (
                f"its code was linked by {find_compiler()} with its own copy of libstdc++, which conflicts with "
                "torch's: set CXX to a compiler that links libstdc++.so, e.g. CXX=/usr/bin/g++"
            )
        return (
            f"the package does not run under torch {torch.__version__}: a process that tried it {ended} ({last}); "
            f"nothing was written; hint: {hint}"
        )

    def close(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.communicate()
        self.said.close()


def has_own_libstdcxx(path: Path) -> bool:
    """Return True if a package contains a static copy of libstdc++: GNU C++ code that does not link libstdc++.so.

    Next to torch's own copy, torch's use of `std::regex` on loading then crashes the process.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as package:
        code = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    return any(b"GLIBC" in part and b"libstdc++.so" not in part and b"libc++.so" not in part for part in code)


def find_compiler() -> str:
    """Return the path of the C++ compiler that Inductor uses, or its name if it is not found."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    name = str(get_cpp_compiler())
    return shutil.which(name) or name


def _alone(tensor: Tensor) -> Tensor:
    """Drop the rest of the storage that a tensor is a view of, which would be saved too, but keep its strides."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        copy = tensor.clone()
        return copy if copy.stride() == tensor.stride() else tensor
    return tensor
