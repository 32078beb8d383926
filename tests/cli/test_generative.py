"""The verbs around a generative recommender, end to end on a toy data set: generate, quantize, analyze, ab."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from loka.cli import app, main, train_sequence
from loka.data.batch import Jagged
from loka.data.progress import Progress, silent
from loka.data.sequences import SequenceData
from loka.records import Analysis, PairedTest, Quantized, from_json, load

runner = CliRunner()


def make_data(users: int = 60, items: int = 80) -> SequenceData:
    """Users walk along a circle of items: the next item is mostly the one after the last."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(users):
        start, n = int(torch.randint(items, (1,), generator=g)), int(torch.randint(6, 14, (1,), generator=g))
        rows.append((start + torch.arange(n)) % items + 1)
    offsets = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    titles = ("", *(f"title {i} of kind{i % 5} shade{i % 7} size{i % 4}" for i in range(1, items + 1)))
    return SequenceData("toy", Jagged(torch.cat(rows), offsets), items, item_keys=titles, titles=titles, texts=titles)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> SequenceData:
    data = make_data()

    def build(*_: object, progress: Progress = silent, **__: object) -> SequenceData:
        progress("reading tables", 0, 1)  # as where no cache is there yet
        return data

    monkeypatch.setattr("loka.data.load_sequences", build)
    monkeypatch.setitem(train_sequence.SMALL, "codebooks", (8, 8, 8))
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onerec")


def run(*words: object, code: int = 0) -> str:
    result = runner.invoke(app, [str(w) for w in words], obj={"debug": False})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.stdout


def fail(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_recommender_from_nothing_to_fp8(folder: Path) -> None:
    text = run("generate", "--train", 15, "--out", folder / "plain", "--users", 2, "--top", 3, "--beams", 20)
    assert text.count("user ") == 2
    assert text.count("title ") >= 6
    found = json.loads(run("generate", "--from", folder / "plain", "--users", 4, "--top", 3, "--beams", 20, "--json"))
    assert len(found) == 4
    assert all(len(one["recommended"]) == 3 and one["recommended"][0]["title"].startswith("title") for one in found)

    text = run("quantize", folder / "plain", "--out", folder / "low", "--export", folder / "export", "--json")
    record = from_json(text.strip(), Quantized)
    assert record.ratio < 0.9
    assert any(site.weight == "e4m3:row" for site in record.sites)
    assert json.loads((folder / "export" / "config.json").read_text())["quantization_config"]["ignore"]

    text = run(
        "ab",
        folder / "plain",
        folder / "low",
        "--margin",
        0.5,
        "--users",
        40,
        "--beams",
        20,
        "--out",
        folder / "ab.json",
    )
    assert "no mismatch found" in text
    test = load(folder / "ab.json", PairedTest)
    assert {m.metric for m in test.metrics} == {"recall@10", "ndcg@10", "log-likelihood"}
    likelihood = next(m for m in test.metrics if m.metric == "log-likelihood")
    assert likelihood.outcome == "equivalent"
    assert likelihood.change.value != 0  # FP8 is not the same model
    assert test.overlap[0].n == 10
    assert test.overlap[0].share > 0.5

    text = run("analyze", folder / "plain", folder / "low" / "model.safetensors", "--out", folder / "a.json")
    assert "published, not measured here" in text
    analysis = load(folder / "a.json", Analysis)
    assert [m.activations_of is None for m in analysis.models] == [False, True]


def test_a_onerec_of_train_is_quantised_generated_with_and_compared(tmp_path: Path) -> None:
    plain, low = tmp_path / "plain", tmp_path / "low"
    options = [word for pair in ("codebooks=[8,8,8]", "beams=12", "items=true") for word in ("--set", pair)]
    run("train", "--model", "onerec", "--config", "tiny-moe", "--data", "toy", "--steps", 4, "--batch-size", 32, "--evaluate-every", 0, *options, "--out", plain)  # fmt: skip
    record = from_json(run("quantize", plain, "--out", low, "--bound", 0.2, "--users", 20, "--json").strip(), Quantized)
    assert record.recipe == "onerec"
    assert any(site.type == "GroupedLinear" and site.weight is not None for site in record.sites)
    for folder in (plain, low):
        (found,) = json.loads(run("generate", "--from", folder, "--items", "3,4", "--top", 2, "--beams", 10, "--json"))
        assert len(found["recommended"]) == 2
    run("ab", plain, low, "--margin", 5, "--users", 20, "--beams", 12, "--out", tmp_path / "ab.json")
    assert load(tmp_path / "ab.json", PairedTest).overlap[0].share > 0.5


def test_a_bound_is_measured_and_kept(folder: Path) -> None:
    if not (folder / "plain").exists():
        run("generate", "--train", 5, "--out", folder / "plain", "--beams", 20)
    text = run("quantize", folder / "plain", "--out", folder / "bounded", "--bound", 0.05, "--users", 30, "--json")
    record = from_json(text.strip(), Quantized)
    assert record.change is not None
    assert record.change.high <= 0.05
    assert all(site.metric_change is not None for site in record.sites if site.weight is not None)
    run("quantize", folder / "plain", "--out", folder / "strict", "--bound", 0.05, "--keep", "*", "--users", 30, code=1)


def test_your_own_history_and_unknown_items(folder: Path) -> None:
    if not (folder / "plain").exists():
        run("generate", "--train", 5, "--out", folder / "plain", "--beams", 20)
    (found,) = json.loads(
        run("generate", "--from", folder / "plain", "--items", "3,4,9999", "--top", 2, "--beams", 10, "--json")
    )
    assert found["unknown"] == 1
    assert len(found["recommended"]) == 2
    (seen,) = json.loads(
        run("generate", "--from", folder / "plain", "--items", "3", "--top", 5, "--exclude-seen", "--json")
    )
    assert 3 not in [row["item"] for row in seen["recommended"]]


def test_refusals_say_what_to_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--from FOLDER) or train one" in fail(capsys, "generate")
    assert "--train needs --out" in fail(capsys, "generate", "--train", 3)
    assert "at least as many --beams" in fail(capsys, "generate", "--from", folder, "--top", 9, "--beams", 3)
    assert "bundle.json" in fail(capsys, "generate", "--from", tmp_path)
    (tmp_path / "ranker").mkdir()
    (tmp_path / "ranker" / "model.safetensors").write_bytes(b"")
    assert "ranker/model.safetensors has its weights" in fail(capsys, "analyze", tmp_path / "ranker")
    assert "no recommender" in fail(capsys, "quantize", tmp_path, "--out", tmp_path / "x")
    assert "ends in .safetensors" in fail(capsys, "quantize", "onerec:tiny", "--out", tmp_path / "x")
    for option in (("--weights", "w.safetensors"), ("--loss", "a:b"), ("--seed", 3)):
        assert "leave them out" in fail(capsys, "quantize", folder / "plain", "--out", tmp_path / "x", *option)
    assert "two folders or two .jsonl" in fail(capsys, "ab", tmp_path, tmp_path / "x.jsonl")


def test_train_does_not_replace_a_recommender_of_another_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (folder / "plain").exists():
        run("generate", "--train", 5, "--out", folder / "plain", "--beams", 20)
    before = (folder / "plain" / "model.safetensors").read_bytes()
    said = fail(capsys, "train", "--model", "onerec", "--data", "toy", "--steps", 1, "--out", folder / "plain")
    assert "holds a recommender that loka train did not make; give a new folder" in said
    assert (folder / "plain" / "model.safetensors").read_bytes() == before


def test_quantize_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    import sys

    from loka.cli.own_code import find_object

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    torch.manual_seed(0)
    model = find_object("own_model:make")()
    save_file(model.state_dict(), "w.safetensors")
    run("quantize", "own_model:make", "--weights", "w.safetensors", "--recipe", "rowwise", "--out", "q.safetensors")
    from loka.ptq import load_quantized

    again, summary = load_quantized("q.safetensors", build=find_object("own_model:make"))
    assert summary.quantized == ["0", "1"]
    x = torch.randn(4, 8)
    assert (again.float()(x) - model(x)).norm() / model(x).norm() < 0.1


class TestFiles:
    def write(self, path: Path, shift: float, users: int = 200) -> Path:
        g = torch.Generator().manual_seed(0)
        base = torch.rand(200, generator=g)
        lines = [
            json.dumps({"user": u, "recall@10": float(base[u]) * (1 + shift), "loss": 1 - float(base[u]) * shift})
            for u in range(users)
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    def test_any_two_models(self, tmp_path: Path) -> None:
        a, b = self.write(tmp_path / "a.jsonl", 0.0), self.write(tmp_path / "b.jsonl", 0.1)
        test = from_json(run("ab", a, b, "--json").strip(), PairedTest)
        assert {m.metric: m.outcome for m in test.metrics} == {"recall@10": "better", "loss": "better"}
        run("ab", b, a, code=1)  # worse is a finding

    def test_no_difference_of_few_users_is_no_evidence(self, tmp_path: Path) -> None:
        a = self.write(tmp_path / "a.jsonl", 0.0, users=20)
        said = run("ab", a, a)
        assert "inconclusive" in said
        assert "equivalent" not in said
        assert "recall@10 differs for no user: its interval is what 20 users can exclude" in said

    def test_the_direction_of_a_metric_is_told_and_may_be_given(self, tmp_path: Path) -> None:
        for name, value in (("a", 1.0), ("b", 1.1)):
            lines = [json.dumps({"user": u, "bounces": value * (1 + u % 7), "clicks": 1.0}) for u in range(50)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")
        words = ("ab", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        assert "better" in run(*words)
        assert "lower is better: bounces" in run(*words, "--lower", "bounces", code=1)

    def test_what_does_not_apply_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        a, b = self.write(tmp_path / "a.jsonl", 0.0), self.write(tmp_path / "b.jsonl", 0.0)
        assert "there is no metric refunds" in fail(capsys, "ab", a, b, "--lower", "refunds")
        assert "--users, --beams: cannot be honoured" in fail(capsys, "ab", a, b, "--users", 5, "--beams", 5)
        assert "--device: cannot be honoured" in fail(capsys, "ab", "--online", tmp_path, "--device", "cuda")
        assert "--lower: cannot be honoured" in fail(capsys, "ab", tmp_path, tmp_path, "--lower", "recall@10")
        (tmp_path / "b.jsonl").write_text('{"user": 1.2, "loss": 0.5}\n')
        assert "user 1.2 is not an integer" in fail(capsys, "ab", a, tmp_path / "b.jsonl")

    def test_a_lost_half_is_a_finding(self, tmp_path: Path) -> None:
        a, b = self.write(tmp_path / "a.jsonl", 0.0), self.write(tmp_path / "b.jsonl", 0.0, users=100)
        assert "MISMATCH" in run("ab", a, b, code=1)

    def test_damage_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        a = self.write(tmp_path / "a.jsonl", 0.0)
        (tmp_path / "b.jsonl").write_text('{"user": 1, "recall@10": 0.5}\n{"user": 2}\n')
        assert "b.jsonl:2" in fail(capsys, "ab", a, tmp_path / "b.jsonl")
        (tmp_path / "b.jsonl").write_text('{"user": 1, "recall@10": 0.5}\n' * 2)
        assert "2 lines of 1 users; expected one line per user" in fail(capsys, "ab", a, tmp_path / "b.jsonl")
        (tmp_path / "b.jsonl").write_text("")
        assert "b.jsonl: no metrics; expected" in fail(capsys, "ab", a, tmp_path / "b.jsonl")


def test_analyze_built_in_models() -> None:
    text = run("analyze", "onerec:tiny", "--layers", "--batches", 1)
    assert "blocks.0.cross.query" in text
    assert "onerec:tiny: untrained (no verdict" in text
