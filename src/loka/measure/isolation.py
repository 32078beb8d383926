"""Run code that may crash in a child process, and record why it failed.

A third-party kernel can end the process (abort, segmentation fault), hang, or corrupt the CUDA context, after which
every later call fails. Here each of these becomes a recorded refusal, and the parent continues.

    outcomes = map_isolated("package.module:function", cases, timeout=60)

starts one child, calls `function(**case)` for each case and reads one JSON line per finished case. If the child dies or
its context is corrupted, the current case is refused with the reason and a new child continues with the next. After
`max_crashes` the remaining cases are refused without being run. Arguments and results are JSON values: nothing is
pickled, so no state of the parent leaks into the child.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

POISONED = 87  # exit status of a child whose CUDA context no longer works


@dataclass(frozen=True)
class Outcome:
    """The result of a case: a value, or the reason why there is none."""

    value: Any = None
    refusal: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.refusal is None


def map_isolated(
    target: str, cases: Sequence[dict[str, Any]], *, timeout: float, case_timeout: float = 60.0, max_crashes: int = 3
) -> list[Outcome]:
    """Call a function for each case in child processes. `timeout` limits the total time, `case_timeout` each case."""
    _resolve(target)  # a wrong name is the caller's mistake, not a crash
    end = time.monotonic() + timeout
    outcomes: list[Outcome] = []
    crashes = 0
    while len(outcomes) < len(cases):
        left = end - time.monotonic()
        if left <= 0 or crashes >= max_crashes:
            why = f"the time box of {timeout:g} s was used up" if left <= 0 else f"crashed {crashes} times before"
            return outcomes + [Outcome(refusal=f"not run: {why}")] * (len(cases) - len(outcomes))
        finished, failure = _run_child(target, cases[len(outcomes) :], left, case_timeout)
        outcomes += finished
        if failure is not None and len(outcomes) < len(cases):  # results written before it died on exit are valid
            outcomes.append(Outcome(refusal=failure))
            crashes += 1
    return outcomes


def _run_child(
    target: str, cases: Sequence[dict[str, Any]], seconds: float, case_seconds: float
) -> tuple[list[Outcome], str | None]:
    """Run one child until it ends. Returns the outcomes of the cases it finished, and how it failed, if it did."""
    with tempfile.TemporaryDirectory(prefix="loka-isolated-") as folder:
        question, answer, noise = Path(folder) / "cases.json", Path(folder) / "outcomes.jsonl", Path(folder) / "stderr"
        question.write_bytes(msgspec.json.encode(list(cases)))
        answer.touch()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with question.open("rb") as stdin, noise.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, target, str(answer)],
                stdin=stdin, stdout=stderr, stderr=stderr, env=environment, start_new_session=True,
            )  # fmt: skip
            late = _wait(process, answer, seconds, case_seconds)
        finished = [Outcome(**msgspec.json.decode(line)) for line in answer.read_bytes().split(b"\n")[:-1]]
        tail = " ".join(noise.read_text(errors="replace").split())[-300:]
    if late is not None:
        return finished, late
    if process.returncode != 0:
        return finished, _describe(process.returncode) + (f": {tail}" if tail else "")
    return finished, None


def _wait(process: "subprocess.Popen[bytes]", answer: Path, seconds: float, case_seconds: float) -> str | None:
    """Wait for the child. If it or one of its cases takes too long, kill it and return the reason."""
    end = time.monotonic() + seconds
    size, progress = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.02)
        if answer.stat().st_size != size:
            size, progress = answer.stat().st_size, time.monotonic()
        now = time.monotonic()
        if now > end or now - progress > case_seconds:
            os.killpg(process.pid, signal.SIGKILL)  # only the child's group: it was started in a new session
            process.wait()
            return f"timed out after {now - progress:.0f} s without an answer"
    return None


def _describe(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "poisoned the CUDA context" if status == POISONED else f"exited with status {status}"


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name, None) if name else None
    if not callable(function):
        raise ValueError(f"isolation target {target!r} is not module:function of something callable")
    return function


def _cuda_works() -> bool:
    """Check that the CUDA context, if there is one, still works. Does not initialize CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(target: str, answer: str) -> int:
    """Run the child process: read cases from stdin and append one line per result to the file `answer`."""
    function = _resolve(target)
    with Path(answer).open("ab", buffering=0) as file:
        for case in msgspec.json.decode(sys.stdin.buffer.read()):
            try:
                fields = {"value": function(**case)}
                if not _cuda_works():
                    raise RuntimeError("the CUDA context failed after the call returned")
            except Exception as error:  # a failure of the code under test is a result
                message = f"{type(error).__name__}: {error}"
                if not _cuda_works():
                    print(message, file=sys.stderr, flush=True)
                    os._exit(POISONED)  # no cleanup: destructors on a dead context hang or abort
                fields = {"refusal": message}
            file.write(msgspec.json.encode(fields) + b"\n")
    return 0


if __name__ == "__main__":  # run as a file, not as a module, so that the child imports only what its target needs
    sys.exit(main(*sys.argv[1:]))
