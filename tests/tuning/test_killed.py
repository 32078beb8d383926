"""A kill -9 at any moment leaves whole files, and the next call goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import loka
from loka.records import load
from loka.records.tuning import Tuning

from .small import MARGIN, Ranker, loss, make_batches


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.slow
def test_twenty_kills_leave_whole_files(tmp_path: Path) -> None:
    kills, folder, tests = 20, tmp_path / "out", Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, "-m", "tuning.killed_child", str(folder), str(kills)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("whole") == kills
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert {path.name for path in files} >= {"evidence.json"}
    for path in files:
        json.loads(path.read_text())
    tuned = loka.tune(Ranker(), make_batches(4, rows=32), loss, margin=MARGIN, out=folder, progress=False)
    assert load(folder / "tuning.json", Tuning) == tuned.record
