"""Tunes models into one folder until it is killed: a process of its own, which forks, so that torch is imported once."""

import os
import random
import signal
import time
from pathlib import Path

import torch

import loka
from loka.tuning.evidence import Evidence

from .small import MARGIN, Ranker, loss, make_batches


def tune_for_ever(folder: Path) -> None:
    batches = make_batches(4, rows=32)
    while True:  # other weights every time, so that everything is measured and written again
        loka.tune(Ranker(), batches, loss, margin=MARGIN, out=folder, progress=False)


def kill_one(folder: Path, generator: random.Random) -> None:
    seen = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    child = os.fork()
    if child == 0:
        torch.manual_seed(os.getpid())
        tune_for_ever(folder)
    began = time.monotonic()
    while {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == seen:
        assert time.monotonic() - began < 60, "nothing was written"
        time.sleep(0.005)
    time.sleep(generator.uniform(0.0, 0.3))  # somewhere in the loop, often in the middle of a write
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_many(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    chosen = random.Random(0)
    for _ in range(kills):
        kill_one(folder, chosen)
        Evidence(
            folder, Ranker(), {"training": True, "margin": MARGIN, "thorough": False, "autocast": "None"}
        )  # readable, or an error
        print("whole", *sorted(path.name for path in folder.glob("*.json")))
