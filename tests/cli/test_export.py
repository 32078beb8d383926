"""`loka export` opens a ranker's folder as serving does, and traces it on a batch drawn from its columns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loka.cli import app
from loka.data.schema import Field, Schema, SequenceField
from loka.exporting import package
from loka.models import build_ranker
from loka.serving import save_ranker

SCHEMA = Schema(("price",), (Field("item", 50),), (SequenceField("seen", 50, 4),), ("click",))


def test_a_rankers_folder_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(program: Any, path: Path, inputs: Any, outputs: Any, shapes: Any, device: Any) -> Any:
        path.write_bytes(b"not compiled")  # compiling takes many seconds; tests of exporting do it once
        return lambda tensors: list(program.module()(*tensors))

    monkeypatch.setattr(package, "_write_aoti", write)
    torch.manual_seed(0)
    save_ranker(build_ranker(SCHEMA, "wukong", "tiny"), SCHEMA, tmp_path / "ranker", family="wukong", size="tiny")
    words = ["export", str(tmp_path / "ranker"), "--out", str(tmp_path / "ranker.pt2"), "--batch-size", "16", "--json"]
    done = CliRunner().invoke(app, words, obj={})
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert Path(made["path"]).read_bytes() == b"not compiled"
    assert any("seen" in name for name in made["inputs"])


def test_a_file_of_untrained_weights_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.exporting.export", lambda *given, **options: "written")
    words = ["export", "wukong:tiny", "--out", str(tmp_path / "m.pt2"), "--batch-size", "16"]
    done = CliRunner().invoke(app, words, obj={})
    assert done.exit_code == 0, done.output
    assert "wukong:tiny has its initial weights and is not trained; hint: --weights" in done.stderr
    assert done.stdout == "written\n"


def test_a_batch_without_rows_is_no_example(tmp_path: Path) -> None:
    save_ranker(build_ranker(SCHEMA, "wukong", "tiny"), SCHEMA, tmp_path / "ranker", family="wukong", size="tiny")
    words = ["export", str(tmp_path / "ranker"), "--out", str(tmp_path / "ranker.pt2"), "--batch-size", "0"]
    assert "--batch-size 0: expected at least 1 row" in str(CliRunner().invoke(app, words, obj={}).exception)
