"""Folders that two processes would write to at the same time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loka.cli import places
from loka.cli.places import claim_folder

HOLD = "import sys, time; from loka.cli.places import claim_folder; from pathlib import Path; claim_folder('--out', Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_folder_that_another_process_writes_to_is_refused_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "x"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"--out .*my runs/x: process {other.pid} is writing there; hint: "):
                claim_folder("--out", folder)
            claim_folder("--out", tmp_path / "y")
        finally:
            other.send_signal(signal.SIGKILL)
    claim_folder("--out", folder)
    claim_folder("--out", folder)  # its own
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_link_in_place_of_a_lock_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that others can write to, as /tmp is, anybody can guess the name of a lock."""
    shared, kept = tmp_path / "shared", tmp_path / "kept.txt"
    shared.mkdir()
    kept.write_text("mine")
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setattr(places, "_CLAIMED", {})
    claim_folder("--out", tmp_path / "x")
    (lock,) = shared.iterdir()
    assert lock.read_text() == str(os.getpid())
    places._CLAIMED.clear()
    lock.unlink()
    lock.symlink_to(kept)
    claim_folder("--out", tmp_path / "x")
    assert kept.read_text() == "mine"


def test_ranks_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        monkeypatch.setenv("RANK", "1")
        claim_folder("--out", tmp_path)
        first.kill()
