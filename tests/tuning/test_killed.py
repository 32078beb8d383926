"""A kill -9 at any moment leaves whole files, and the next call goes on."""

import json
import os
from pathlib import Path

import pytest

import loka
from forked import finish, start
from loka.records import load
from loka.records.tuning import Tuning

from .killed_child import kill_many
from .small import MARGIN, Ranker, loss, make_batches


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.slow
def test_twenty_kills_leave_whole_files(tmp_path: Path) -> None:
    kills, folder, said = 20, tmp_path / "out", tmp_path / "said"
    assert finish(start(kill_many, folder, kills, said=said), 300) == 0, said.read_text()[-2000:]
    assert said.read_text().count("whole") == kills
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert {path.name for path in files} >= {"evidence.json"}
    for path in files:
        json.loads(path.read_text())
    tuned = loka.tune(Ranker(), make_batches(4, rows=32), loss, margin=MARGIN, out=folder, progress=False)
    assert load(folder / "tuning.json", Tuning) == tuned.record
