"""A package is tried in a process of its own: what that process says comes back, and its end is not ours."""

import contextlib
import zipfile
from pathlib import Path

import pytest
import torch

from loka.exporting import trying


def child(body: str) -> str:
    """A process that answers like the one that runs packages, with something else in the package's place."""
    loads = "torch._inductor.aoti_load_package(sys.argv[1], device_index=int(sys.argv[2]))"
    assert loads in trying._CHILD
    return trying._CHILD.replace(loads, "lambda *x: body(*x)").replace("import torch\n", f"import signal, time, torch\n{body}\n")  # fmt: skip


def run(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    monkeypatch.setattr(trying, "_CHILD", child(body))
    with contextlib.closing(trying.Tried(folder / "model.pt2", torch.device("cpu"))) as tried:
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


@pytest.mark.parametrize(("needed", "told"), [(b"libc.so.6 libstdc++.so.6", False), (b"libc.so.6", True)])
def test_code_with_a_library_of_its_own_is_told_what_to_set(needed: bytes, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as package:
        package.writestr("model/data/a.wrapper.so", b"ELF GLIBC_2.34 " + needed)
        package.writestr("model/data/a.wrapper.cpp", "GLIBC")
    with pytest.raises(ValueError, match="SIGSEGV") as error:
        run("def body(x, y): os.kill(os.getpid(), signal.SIGSEGV)", tmp_path, monkeypatch)
    assert ("set CXX" in str(error.value)) == told


def test_what_a_package_prints_is_not_taken_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "print('at the start')\ndef body(x, y):\n    os.write(1, b'done\\nfrom C\\n'); print('from Python'); return x + 1"
    (first,), (second,) = run(body, tmp_path, monkeypatch)
    assert torch.equal(first, torch.arange(3) + 1)
    assert torch.equal(second, torch.arange(5) + 1)


def test_a_package_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "PATIENCE", 0.5)
    with pytest.raises(ValueError, match=r"gave no answer within 0\.5 s"):
        run("def body(x, y): time.sleep(600)", tmp_path, monkeypatch)


def test_a_view_is_written_without_the_memory_it_is_a_view_of() -> None:
    whole = torch.zeros(1000, 8)
    for view in (whole[4:6], whole[4:6].t()):
        alone = trying._alone(view)
        assert alone.stride() == view.stride()
        assert alone.untyped_storage().nbytes() == 64
    for view in (whole[:, 2:4], whole[:1].expand(5, 8)):  # a copy would lie otherwise
        assert trying._alone(view).stride() == view.stride()
