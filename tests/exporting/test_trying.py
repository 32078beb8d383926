"""A package is tried in a process of its own: what that process says comes back, and its end is not ours."""

import contextlib
from pathlib import Path

import pytest
import torch

from loka.exporting import trying


def child(body: str) -> str:
    """A process that answers like the one that runs packages, with something else in the package's place."""
    return trying._CHILD.replace("torch._inductor.aoti_load_package(sys.argv[1])", "lambda *x: body(*x)").replace("import faulthandler, sys, torch", f"import faulthandler, os, signal, sys, torch\n{body}")  # fmt: skip


def run(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    monkeypatch.setattr(trying, "_CHILD", child(body))
    with contextlib.closing(trying.Tried(folder / "model.pt2")) as tried:
        return [tried([torch.arange(n), torch.ones(2)]) for n in (3, 5)]


def test_results_of_several_calls_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run("def body(x, y): return {'sum': x.sum(), 'pair': (y, y + 1)}", tmp_path, monkeypatch)
    assert [float(t.sum()) for t in first] == [3.0, 2.0, 4.0]
    assert float(second[0]) == 10.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def body(x, y): os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("def body(x, y): raise RuntimeError('no kernel for this card')", r"ended with 1 \(RuntimeError: no kernel for this card\)"),
        ("sys.exit(3)", r"ended with 3"),
    ],
    ids=["a crash", "an error", "at the start"],
)  # fmt: skip
def test_a_process_that_ends_is_an_error_that_says_why(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=f"does not run under torch .*{said}"):
        run(body, tmp_path, monkeypatch)
