"""Every example is short, and runs as written."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from forked import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "convert_your_own_model": "2 of 3 linears converted, 1 kept",
    "for_torchao_users": "swaps ['0', '2']",
    "low_precision_tables": "0.254 of float32's bytes",
    "option_pricing": "mean absolute error of the price",
    "plan_here_use_there": "refused: the plan is for NVIDIA H200, the model is on cpu",
    "probe_inside_your_own_loop": "linears converted",
    "torchrec_pipeline": "chain",
    "tune_inside_a_trainer": "2 linears ran in FP8",
    "your_own_torchrec_script": "2 of 2 linears converted",
    "write_a_backend": "Broken fails the conformance gate",
}
NEEDS = {"torchrec_pipeline": "torchrec", "your_own_torchrec_script": "torchrec"}  # optional libraries
LINES = {
    "torchrec_pipeline": 90,
    "your_own_torchrec_script": 44,
}  # most of it is TorchRec's: tables, a batch that moves between devices


def test_each_example_is_known() -> None:
    assert {path.stem for path in EXAMPLES} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_as_written(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES.get(path.stem, 40)
    code, said = run_script(path, folder=tmp_path)
    if path.stem in NEEDS and find_spec(NEEDS[path.stem]) is None:
        assert code == 1
        assert f"pip install 'loka[{NEEDS[path.stem]}]'" in said
        assert "Traceback" not in said
        pytest.skip(f"{NEEDS[path.stem]} is not installed")
    assert code == 0, said
    assert SAYS[path.stem] in said
