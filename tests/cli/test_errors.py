"""What a person can get wrong on the command line is answered with one message that says what to do, and stdout stays data."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import loka
from loka import cli
from loka.cli.own_code import blame, find_object
from loka.cli.subject import find_device
from loka.training import Trainer

runner = CliRunner()
HERE = __name__
QUICK = ("--steps", "2", "--batch-size", "16", "--every", "1", "--samples", "2", "--sensitivity", "16")
OWN = ("probe", "--model", f"{HERE}:factory", "--data", f"{HERE}:batches", *QUICK, "--recipe", "rowwise")


def factory() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def batches(split: str, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(2):
        yield torch.ones(batch_size, 6), torch.ones(batch_size, 1)


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        print("the model speaks")
        out: Tensor = self.last(self.first(x))
        return out


def loud_factory() -> nn.Module:
    print("the factory speaks")
    return Loud()


def loud_batches(split: str, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches(split, batch_size, seed):
        print("the batches speak")
        yield batch


def loud_loss(output: Tensor, targets: Tensor) -> Tensor:
    print("the loss speaks")
    return (output - targets).square()


def fail(*words: object) -> str:
    """The message of a request that cannot be honoured, as `main` prints it."""
    result = runner.invoke(cli.app, [str(word) for word in words], obj={})
    assert result.exit_code != 0, result.output
    if isinstance(result.exception, SystemExit):
        return result.stderr
    assert isinstance(result.exception, Exception)
    text = cli._explain(result.exception)
    assert not text.startswith("internal error"), text
    return text


@pytest.mark.parametrize(
    "words",
    [
        ("probe", "--model", f"{HERE}:factory", *QUICK),
        ("analyze", f"{HERE}:factory"),
        ("mods", "apply", "--model", f"{HERE}:factory", "--mods", "no_bias"),
        ("quantize", f"{HERE}:factory", "--recipe", "rowwise", "--bound", "0.1", "--out", "q.safetensors"),
    ],
    ids=lambda words: words[0],
)
def test_a_model_of_ones_own_without_its_data(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = fail(*words)
    assert f"{HERE}:factory was called with a Batch of complete-journey and cannot take it" in text
    assert "hint: --data pkg.module:batches" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    assert "--device cuda: torch sees no CUDA GPU" in fail(*OWN, "--device", "cuda")
    assert "--device cuda: torch sees no CUDA GPU" in fail("generate", "--train", 1, "--out", "x", "--device", "cuda")


def test_a_device_that_is_none() -> None:
    with pytest.raises(ValueError, match="--device abacus"):
        find_device("abacus")
    assert find_device("cpu") == torch.device("cpu")


def test_weights_that_cannot_be_loaded(tmp_path: Path) -> None:
    words = ("quantize", f"{HERE}:factory", "--recipe", "rowwise", "--out", tmp_path / "q.safetensors", "--weights")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no tensors here")
    assert f"error: --weights {bad}: " in fail(*words, bad)
    assert f"error: --weights {tmp_path}/none.safetensors: " in fail(*words, tmp_path / "none.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"0.weight": torch.ones(3, 3)}, other)
    assert "size mismatch for 0.weight" in fail(*words, other)
    assert not (tmp_path / "q.safetensors").exists()


def test_a_full_disk_is_no_internal_error() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write names no file
    assert cli._explain(full).startswith("error: No space left on device")


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    assert f"--out {tmp_path}: is a folder" in fail(*OWN, "--out", tmp_path)
    assert f"{tmp_path}/file cannot be written" in fail(*OWN, "--out", tmp_path / "file" / "probe.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert f"--html {tmp_path}/a/b.html: {tmp_path} cannot be written" in fail(
        *OWN, "--html", tmp_path / "a" / "b.html"
    )


@pytest.mark.parametrize(
    ("words", "speakers"),
    [
        (("probe", "--recipe", "rowwise", *QUICK, "--loss", f"{HERE}:loud_loss"), ("factory", "model", "batches", "loss")),
        (("mods", "apply", "--mods", "no_bias"), ("factory", "model", "batches")),
    ],
    ids=["probe", "mods"],
)  # fmt: skip
def test_what_ones_own_code_prints_is_not_data(words: tuple[str, ...], speakers: tuple[str, ...]) -> None:
    own = ("--model", f"{HERE}:loud_factory", "--data", f"{HERE}:loud_batches", "--json")
    result = runner.invoke(cli.app, [*words, *own], obj={})
    assert result.exit_code == 0, (result.output, result.exception)
    assert isinstance(json.loads(result.stdout), dict)
    for speaker in speakers:
        assert f"the {speaker} speak" in result.stderr


def test_ctrl_c_while_probe_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loka.probe.Probe.evaluate", interrupt)
    result = runner.invoke(cli.app, [*OWN, "--out", str(tmp_path / "probe.json")], obj={})
    assert "the probe's state is saved; the same command with --resume evaluates it" in result.stderr
    assert (tmp_path / "probe.json.state.safetensors").exists()
    assert "is kept" not in runner.invoke(cli.app, [*OWN], obj={}).stderr


def test_ctrl_c_while_training_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "--model", "dlrm", "--data", "synthetic", "--data-option", "rows=600", "--batch-size", "32", "--steps", "4"]  # fmt: skip
    words += ["--evaluate-every", "0"]
    kept = ["--checkpoint-every", "1", "--out", str(tmp_path / "run")]
    real = Trainer.fit

    def interrupted(self: Trainer, **options: Any) -> None:
        real(self, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupted)
    result = runner.invoke(cli.app, [*words, *kept], obj={})
    assert f"{tmp_path / 'run'} keeps step-00000004; the same command with --resume continues after it" in result.stderr
    monkeypatch.setattr(Trainer, "fit", lambda self, **_: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert "nothing is kept" in runner.invoke(cli.app, words, obj={}).stderr


def wrong_loss(output: Tensor) -> Tensor:
    return output.mean()


def nothing(split: str) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(())


@pytest.mark.parametrize("verb", ["probe", "tune"])
def test_losses_of_the_wrong_arity_and_empty_batches_are_named(verb: str, tmp_path: Path) -> None:
    first = ["probe", "--model", f"{HERE}:factory"] if verb == "probe" else ["tune", f"{HERE}:factory"]
    out = ["--out", str(tmp_path / "out")]
    said = runner.invoke(cli.app, [*first, "--data", f"{HERE}:batches", "--loss", f"{HERE}:wrong_loss", *out], obj={})
    assert isinstance(said.exception, ValueError)
    assert "wrong_loss" in str(said.exception)
    assert "cannot be called with (output, targets)" in str(said.exception)
    said = runner.invoke(cli.app, [*first, "--data", f"{HERE}:nothing", *out], obj={})
    assert isinstance(said.exception, ValueError)
    assert "batch" in str(said.exception)


def broken_factory() -> nn.Module:
    raise KeyError("a table")


def broken_batches(split: str) -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.ones(4, 6), torch.ones(4, 1)
    raise KeyError("a column")


def narrow_batches(split: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(2):
        yield torch.ones(batch_size, 5), torch.ones(batch_size, 1)


@pytest.mark.parametrize(
    ("model", "data", "function", "said"),
    [
        ("broken_factory", "batches", "broken_factory", "KeyError: 'a table'"),
        ("factory", "broken_batches", "broken_batches", "KeyError: 'a column'"),
        ("loud_factory", "narrow_batches", "forward", "RuntimeError: mat1 and mat2 shapes"),
    ],
)
@pytest.mark.parametrize("verb", ["probe", "tune"])
def test_what_ones_own_code_raises_is_no_internal_error(
    verb: str, model: str, data: str, function: str, said: str, tmp_path: Path
) -> None:
    first = ["probe", "--model", f"{HERE}:{model}"] if verb == "probe" else ["tune", f"{HERE}:{model}"]
    text = fail(*first, "--data", f"{HERE}:{data}", "--out", tmp_path / "out")
    assert f"error: your code raised {said}" in text
    assert f"{__file__}, line " in text
    assert f", in {function}\n" in text


@pytest.mark.parametrize("verb", ["probe", "tune"])
def test_a_model_of_torchs_modules_that_its_batches_do_not_fit(verb: str, tmp_path: Path) -> None:
    first = ["probe", "--model", f"{HERE}:factory"] if verb == "probe" else ["tune", f"{HERE}:factory"]
    text = fail(*first, "--data", f"{HERE}:narrow_batches", "--out", tmp_path / "out")
    assert f"a batch of {HERE}:narrow_batches does not go through the model and the loss: RuntimeError: mat1" in text


def test_what_a_converted_module_raises_is_not_blamed_on_the_model() -> None:
    """The model's forward is in the traceback, and below it code of loka, which is to be reported."""
    model = find_object(f"{HERE}:loud_factory")()
    loka.convert(model, recipe="rowwise")
    with pytest.raises(Exception, match="5") as caught:
        model(torch.ones(2, 5))
    assert blame(caught.value) is None


def test_names_that_lead_nowhere_say_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no built-in family has that name: dcn, " in fail("tune", "wukoong:small", "--out", "out")
    assert "error: there is no file or folder runs/onerec" in fail("quantize", "runs/onerec", "--out", "runs/low")
    assert "error: there is no file or folder runs/onerec" in fail("analyze", "runs/onerec")
    assert "error: there is no file or folder runs/demo" in fail("report", "runs/demo")
    (tmp_path / "half_written.py").write_text("def build(:\n")
    text = fail("tune", "half_written:build", "--data", "half_written:batches", "--out", "out")
    assert "half_written.py, line 1: " in text


def test_options_are_named_as_they_were_typed(tmp_path: Path) -> None:
    tune = ("tune", f"{HERE}:factory", "--data", f"{HERE}:batches", "--out", tmp_path / "out")
    assert "error: --row-factor 4 needs --target" in fail(*tune, "--row-factor", 4)
    (tmp_path / "text").write_text("no tensors")
    assert f"error: --checkpoint {tmp_path}/none: " in fail(*tune, "--checkpoint", tmp_path / "none")
    assert f"error: --checkpoint {tmp_path}/text: not a safetensors file" in fail(*tune, "--checkpoint", tmp_path / "text")  # fmt: skip
    text = fail("simulate", "--forward", 4, "--backward", 8, "--dense", 1, "--gpus", "8,many")
    assert "error: --gpus '8,many': expected whole numbers with commas between them" in text


def test_a_load_test_that_cannot_be_sent_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    load, given = ("load", "http://127.0.0.1:9", "--model", "m"), tmp_path / "requests.jsonl"
    for text, said in (
        ('{"user": "u"}\n\nnot json\n', "line 3: JSON is malformed"),
        ("[1]\n", "line 1: Expected `object`"),
    ):
        given.write_text(text)
        assert f"{given}, {said}" in fail(*load, "--requests", given)
    assert "none: cannot be read: No such file" in fail(*load, "--requests", tmp_path / "none")
    assert "error: rate is -1.0; expected a positive number" in fail(*load, "--rate", -1)
    assert "--late nan: expected a share from 0 to 1" in fail(*load, "--late", "nan")


@pytest.mark.parametrize(
    "words",
    [
        ("load", "http://127.0.0.1:9", "--model", "m", "--out"),
        ("load", "http://127.0.0.1:9", "--model", "m", "--report"),
        ("ab", "a.jsonl", "b.jsonl", "--out"),
        ("analyze", "wukong:tiny", "--out"),
        ("bench", "kernels", "--device", "cpu", "--out"),
        ("quantize", f"{HERE}:factory", "--out"),
        ("mods", "apply", "--model", f"{HERE}:factory", "--data", f"{HERE}:batches", "--mods", "no_bias", "--out"),
        ("plan", "nosuch.json", "--out"),
        ("translate", "nosuch.json", "torchao", "--out"),
        ("report", "nosuch", "--out"),
        ("db", "export", "--out"),
    ],
    ids=lambda words: " ".join((words[0], words[-1])),
)
def test_results_that_could_not_be_written_are_not_computed(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    assert f"{words[-1]} {folder}: is a folder, expected a file" in fail(*words, folder)
    inside = tmp_path / "file" / "x.safetensors"
    assert f"{words[-1]} {inside}: {tmp_path / 'file'} cannot be written" in fail(*words, inside)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--train", "1", "--out"),
        ("quantize", f"{HERE}:factory", "--out", "q.safetensors", "--export"),
        ("convert", f"{HERE}:factory", "--recipe", "rowwise", "--out"),
        ("tune", "nosuch", "--train-steps", "1", "--out"),
        ("train", "--model", "nosuch", "--out"),
        ("demo", "--size", "nosuch", "--out"),
    ],
    ids=lambda words: words[0],
)
def test_folders_that_could_not_be_made_are_refused_before_the_work(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert f"{words[-1]} {tmp_path}/file: is a file, expected a folder" in fail(*words, tmp_path / "file")
    assert f"{words[-1]} {tmp_path}/file/a: {tmp_path}/file cannot be written" in fail(*words, tmp_path / "file" / "a")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "IN", "--out", "IN"),
        ("translate", "IN", "torchao", "--out", "IN"),
        ("report", "IN", "--out", "IN"),
        ("report", "FOLDER", "--out", "IN"),
        ("report", "FOLDER", "elsewhere", "--out", "IN"),
        ("report", "elsewhere", "--add", "IN", "--out", "IN"),
        ("ab", "IN", "other.jsonl", "--out", "IN"),
        ("load", "http://127.0.0.1:9", "--model", "m", "--requests", "IN", "--out", "IN"),
        ("db", "export", "--db", "IN", "--out", "IN"),
        ("convert", f"{HERE}:factory", "--recipe", "rowwise", "--weights", "IN", "--out", "FOLDER"),
        ("convert", f"{HERE}:factory", "--recipe", "rowwise", "--weights", "FOLDER", "--out", "FOLDER"),
        ("quantize", "FOLDER", "--out", "FOLDER"),
        ("quantize", f"{HERE}:factory", "--weights", "x.safetensors", "--out", "x.safetensors"),
    ],
    ids=" ".join,
)
def test_what_is_read_is_not_replaced(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text("{}")
    source = tmp_path / "in.json"
    source.write_text("{}")
    given = [str({"IN": source, "FOLDER": tmp_path}.get(word, word)) for word in words]
    assert f"{words[-2]} {given[-1]}: would replace what this command reads" in fail(*given)
    assert source.read_text() == "{}"


def test_generate_keeps_a_model_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text("{}")
    assert f"--out {tmp_path}: holds a model already" in fail("generate", "--train", 1, "--out", tmp_path)
    assert "--from a writes nothing" in fail("generate", "--from", "a", "--out", tmp_path)


@pytest.mark.parametrize("option", ["layers=x", "layers=2.5", "top=3", "style=1", "bias=7"])
def test_model_options_of_the_wrong_type_are_named(option: str) -> None:
    name = option.partition("=")[0]
    assert f"option {name} of wukong is " in fail("mods", "apply", "--set", option, "--data", "synthetic", "--data-option", "rows=1000")  # fmt: skip


def test_data_options_of_the_wrong_type_are_named() -> None:
    text = fail("mods", "apply", "--data", "synthetic", "--data-option", "rows=many")
    assert "option rows of synthetic is 'many': expected `int`, got `str`" in text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--samples", 0, "--samples 0: expected a number above 0"),
        ("--threads", 0, "--threads 0: expected a number above 0"),
        ("--max-error", "nan", "--max-error nan: expected a number above 0"),
        ("--backend", "nope", "scaled_mm has no backend 'nope'"),
    ],
)
def test_what_the_evaluation_would_refuse_is_refused_before_the_training(
    option: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loka.cli.probe.learn", lambda *_, **__: pytest.fail("it trained"))
    assert said in fail(*OWN, option, value)


def test_threads_and_the_monitor_of_train_are_checked() -> None:
    assert "--threads 0: expected at least 1" in fail("train", "--threads", 0)
    assert "monitor='nope' is none of auc, gauc, hr, " in fail("train", "--monitor", "nope", "--data", "synthetic", "--data-option", "rows=600")  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"), [("--train-steps", -1), ("--batches", 1), ("--margin", "nan"), ("--seconds", 0)]
)
def test_numbers_of_tune_are_checked_before_a_model_is_opened(option: str, value: object, tmp_path: Path) -> None:
    text = fail("tune", "no.such:model", "--out", tmp_path / "out", option, value)
    assert f"{option} {value}" in text
    assert "expected" in text


@pytest.mark.parametrize(("option", "value"), [("--margin", -1), ("--margin", "nan"), ("--top", 0)])
def test_numbers_of_ab_are_checked_before_models_are_opened(option: str, value: object) -> None:
    assert f"{option} {value}" in fail("ab", "none", "none", option, value)


def text_batches(split: str) -> Iterator[tuple[str, str]]:
    yield "a", "b"


def test_data_that_analyze_cannot_run_is_named() -> None:
    assert "nothing: no batch in pass 0 over 'train'" in fail("analyze", f"{HERE}:factory", "--data", f"{HERE}:nothing")
    text = fail("analyze", f"{HERE}:factory", "--data", f"{HERE}:text_batches")
    assert f"a batch of {HERE}:text_batches does not go through the model and the loss: TypeError: linear()" in text


def test_export_refuses_what_it_would_not_use_or_could_not_write(tmp_path: Path) -> None:
    words = ("export", "wukong:tiny", "--recipe", "rowwise", "--out")
    assert "--factory a:b is for a ranker's folder" in fail(*words, tmp_path / "x.pt2", "--factory", "a:b")
    assert f"--out {tmp_path}: is a folder, expected a file" in fail(*words, tmp_path)
