"""Try a package in a process of its own, which has torch and nothing of this library: what will run it is tried, and a package that ends its process does not end this one."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loka.exporting.signature import flatten_result

# Every line that comes in names a file of inputs; the results go into a file beside it.
_CHILD = """
import faulthandler, sys, torch
faulthandler.enable()
run = torch._inductor.aoti_load_package(sys.argv[1])
for line in sys.stdin:
    name = line.strip()
    with torch.no_grad():
        torch.save(run(*torch.load(name)), name + ".out")
        print("done", flush=True)
"""


class Tried:
    """A package that runs elsewhere, until it is closed.

    Args:
        path: the package. Inputs and results are written beside it.

    Example:
        >>> with contextlib.closing(Tried(Path("ranker.pt2"))) as run:
        ...     scores = run([dense, ids])
    """

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, 0
        self.said = (path.parent / "said.txt").open("w+")
        self.child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, cwd=path.parent,
        )  # fmt: skip

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results, flat.

        Args:
            tensors: the package's inputs.

        Returns:
            Its tensors.

        Raises:
            ValueError: the process ended, or the package raised; the message has its last words.
        """
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.calls += 1
        given = self.path.parent / f"inputs{self.calls}.pt"
        torch.save(list(tensors), given)
        try:
            self.child.stdin.write(f"{given}\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # it ended before; the next line says why
        if self.child.stdout.readline().strip() != "done":
            raise ValueError(self._why())
        return flatten_result(torch.load(f"{given}.out", weights_only=False))  # written by the process above

    def _why(self) -> str:
        code = self.child.wait()
        self.said.seek(0)
        words = [line.strip() for line in self.said if line.strip()]
        where = next((line for line in words if line.startswith("File ")), "")
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        last = where if code < 0 else (words[-1] if words else "without a word")
        return f"the package does not run under torch {torch.__version__}: a process that tried it {ended} ({last}); nothing was written; hint: format='onnx', or another version of torch"

    def close(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.communicate()
        self.said.close()
