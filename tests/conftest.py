"""What every test gets: a fixed seed, reproducible hypothesis examples, and a word about the tests that need a GPU."""

import gc
import os
import random
import sys

# An op whose results are one tensor is an error here on every machine; torch alone warns, and raises only where CI is set. Read when torch is imported, also by the processes that tests start.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")
# One thread, as `make test` has it: with several, a busy machine may cut a product otherwise from one call to the next, and equal to the bit is no longer equal.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

gc.set_threshold(100_000, 50, 100)  # from here on: collecting eleven thousand tests takes a third less time
NO_GPU = "no CUDA GPU on this machine: the tests marked `gpu` are deselected"

# Derandomised: the same examples in every run, so that a red test is red for everybody. No database: nothing is left behind.
settings.register_profile("loka", derandomize=True, deadline=None, database=None)
settings.load_profile("loka")


def pytest_report_header() -> list[str]:
    return [] if torch.cuda.is_available() else [NO_GPU]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: a collector that walks over all of it again and again takes an eighth of the time of tests that compile."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the tests of a file leave behind, compiled code above all, goes or is never looked at again: looking for units walks over every object, and so does every collection."""
    if nextitem is None or nextitem.path != item.path:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Again at the end: `-q` hides the header."""
    if not torch.cuda.is_available():
        terminalreporter.write_line(NO_GPU)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture
def device() -> torch.device:
    """The best device of this machine: a test that takes it runs on both kinds."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
