"""The FP8 attention benchmark runs from the command line, and a kernel that fails or is wrong is recorded, not timed."""

import json
from pathlib import Path

import pytest
import torch

from forked import run_script

pytest.importorskip("triton", exc_type=ImportError)

from .scripts import BENCHMARKS, script


def test_a_dry_run_writes_every_time_and_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "attention_fp8.json"
    code, said = run_script(BENCHMARKS / "attention_fp8.py", "--device", "cpu", "--out", str(out))
    assert code == 0, said[-2000:]
    record = json.loads(out.read_text())
    assert record["environment"]["command"].startswith("attention_fp8.py --device cpu")
    assert [row["case"] for row in record["rows"]] == ["hstu", "interformer", "engine"]
    for row in record["rows"]:
        assert row["why"] == ""
        assert all(tile["why"] == "" and tile["us"][0] > 0 for tile in row["tiles"])
        assert row["bf16"]["error"] < 1e-5  # float32 here
        assert 0.01 < row["fp8"]["error"] < 0.07  # three mantissa bits of queries, keys, weights and values
        assert {"fp8 with cast", "cast"} < set(row)
        assert "bf16 over e4m3" in row if row["case"] == "engine" else {"fp8 with quantize", "quantize"} < set(row)


class Side:
    """Operands whose FP8 kernel fails with one tile and is wrong with the other."""

    uses = 1

    def __init__(self, case: object, device: str, seed: int) -> None:
        self.q = self.k = self.v = torch.ones(4)

    def find_largest(self) -> torch.Tensor:
        return torch.ones(1)

    def cast(self, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.k,)

    def run_plain(self) -> torch.Tensor:
        return self.q

    run_exactly = run_plain

    def run_low(self, made: tuple[torch.Tensor, ...], tile: object) -> torch.Tensor:
        if tile.queries == 16:
            raise ValueError("does not fit")
        return 1.2 * self.q


def test_a_tile_that_fails_or_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("attention_fp8")
    monkeypatch.setitem(benchmark.SIDES, "silu", Side)
    case, row = benchmark.TINY[0], {}
    verdicts = benchmark.compile_all([case], "cpu", 0.0)
    with pytest.raises(RuntimeError, match="no tile of the FP8 kernel is right"):
        benchmark.measure(case, "cpu", verdicts, row)
    assert [tile["why"] for tile in row["tiles"]] == ["ValueError: does not fit", "wrong: relative L2 0.200"]
    assert not any("us" in tile for tile in row["tiles"])
