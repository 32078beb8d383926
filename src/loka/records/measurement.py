"""Measured values: a number with its interval, and the machine it was measured on."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loka.records.record import Part


class Interval(Part, frozen=True):
    """An estimate with its 95 % interval. Decisions use the worse end.

    Example:
        >>> f"{Interval(value=1.25, low=1.2, high=1.3):.2fx}"
        '1.25x [1.20, 1.30]'
    """

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"interval [{self.low}, {self.high}] does not contain its value {self.value}")

    def __format__(self, spec: str) -> str:
        """Format value and ends with a float format; a trailing `x` in the spec marks a factor."""
        factor = "x" if spec.endswith("x") else ""
        each = spec.removesuffix("x")
        return f"{self.value:{each}}{factor} [{self.low:{each}}, {self.high:{each}}]"


class Environment(Part, frozen=True):
    """Where and how numbers were measured: enough to reproduce them, and to reject them on another machine."""

    date: str  # ISO 8601, UTC
    command: str
    loka: str
    commit: str | None  # None outside a git checkout
    python: str
    torch: str
    triton: str | None
    device: str  # "cpu", or the GPU's name
    driver: str | None
    cpu: str
    threads: int


def capture_environment(
    *, command: str | None = None, device: str = "cpu", driver: str | None = None, threads: int | None = None
) -> Environment:
    """Describe this process. Does not import torch: versions come from the installed packages, the device from the
    caller.

    Args:
        command: the command that was run; None for this process's own, with absolute paths reduced to file names. One
            machine's folders mean nothing elsewhere, and removing them from a plan later would break its seal.
        device: "cpu", or the name of the GPU.
        driver: version of its driver.
        threads: number of CPU threads; None for the number of cores.

    Returns:
        The environment, to be stored with every measurement.

    Example:
        >>> capture_environment(device="cpu").torch
    """
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or shlex.join([*_program_words(Path(sys.argv[0])), *map(_strip_folders, sys.argv[1:])]),
        loka=installed_version("loka") or "not installed",
        commit=_find_commit(),
        python=platform.python_version(),
        torch=installed_version("torch") or "not installed",
        triton=installed_version("triton"),
        device=device,
        driver=driver,
        cpu=_name_cpu(),
        threads=threads or os.cpu_count() or 1,
    )


def _program_words(path: Path) -> list[str]:
    """Return the words that start this program: `python -m package` leaves the path of its __main__.py in argv."""
    if path.name != "__main__.py":
        return [path.name]
    return ["loka"] if path.parent.name == "loka" else ["python", "-m", path.parent.name]


def _strip_folders(word: str) -> str:
    option, separator, value = word.rpartition("=")
    return f"{option}{separator}{Path(value).name}" if value.startswith("/") else word


@cache
def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache  # imported code does not change, and two git calls for every plan tried took half the time of a small tune
def _find_commit() -> str | None:
    """Return the commit of the checkout this package is imported from; "+" marks uncommitted changes."""
    here = Path(__file__).resolve().parent.parent
    git = partial(subprocess.run, cwd=here, capture_output=True, text=True, timeout=10, check=True)
    try:
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--", "."]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changed else commit


@cache
def _name_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.machine()
