import re

import torch

from loka.measure.device import peaks, snapshot
from loka.records import to_json
from loka.records.performance import KernelBench


def test_a_snapshot_says_where_numbers_come_from() -> None:
    environment = snapshot("pytest")
    assert environment.command == "pytest"
    assert environment.torch == str(torch.__version__)
    assert environment.cpu
    assert environment.threads == torch.get_num_threads()
    assert environment.commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", environment.commit)
    assert (environment.device == "cpu") == (not torch.cuda.is_available())
    assert to_json(KernelBench(method="none", peaks=None, rows=[], environment=environment))  # plain types only


def test_a_snapshot_starts_no_cuda_where_there_is_none() -> None:
    snapshot("pytest")
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


def test_peaks_are_plausible_here() -> None:
    found = peaks("cpu", repeats=3)
    assert 1e8 < found.copy_bytes_per_second < 1e13
    assert 1e6 < found.bf16_flops < 1e15
    assert found.fp8_flops is None  # no FP8 unit on a CPU, and no number for it
