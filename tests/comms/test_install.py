"""Where TorchRec is missing, the error says how to install it, with and without a GPU."""

import tomllib
from pathlib import Path

import pytest

from loka.comms.torchrec import require


def test_a_missing_torchrec_comes_with_what_a_cpu_needs() -> None:
    with pytest.raises(ValueError, match="fbgemm-gpu-cpu") as raised:
        require("torchrec.no_such_module")
    said = str(raised.value)
    assert "pip install 'loka[torchrec]'" in said
    assert "--no-deps" in said
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for requirement in project["project"]["optional-dependencies"]["torchrec"]:
        assert requirement in said
