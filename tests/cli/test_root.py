"""The command line: help is quick and complete, errors are one message, exit codes mean what the house says."""

import errno
import io
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors import SafetensorError

import loka
from loka import cli


def run(*words: str) -> subprocess.CompletedProcess[str]:
    code = "from loka.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_verb_and_needs_no_torch() -> None:
    start = time.monotonic()
    code = (
        "import sys\nfrom loka.cli import main\ntry:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'numpy', 'polars', 'sklearn', 'triton', 'vl_convert'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert time.monotonic() - start < 20  # a busy machine included; alone it takes half a second


def test_short_help_of_a_verb_and_of_a_verb_in_a_group() -> None:
    for words in (["-h"], ["plan", "-h"], ["data", "get", "-h"]):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert "--help" in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, loka.__version__)


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = run("fly")
    assert done.returncode == 2
    assert "fly" in done.stderr
    assert done.stdout == ""


def test_an_error_is_one_message_on_stderr(tmp_path: object) -> None:
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "holds no records" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_folder_of_a_job_is_answered_with_its_records(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "progress.json").write_text('{"kind": "progress"}')
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} is the folder of a job; its records are in {tmp_path / 'records'}\n"


def test_debug_shows_where_it_came_from(tmp_path: object) -> None:
    done = run("--debug", "report", str(tmp_path))
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("seen this, expected that"), 2, "error: seen this"),
        (RuntimeError("odd"), 2, "internal error: RuntimeError: odd"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            PermissionError(13, "Permission denied", "/somewhere/plan.json"),
            2,
            "error: /somewhere/plan.json: Permission denied\n",
        ),
        (SafetensorError("header too small"), 2, "error: a file cannot be read: header too small"),
    ],
)
def test_what_a_verb_raises_becomes_an_exit_code(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.callback()
    def start() -> None:
        """A group."""

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as end:
        cli.main(["fail"])
    assert end.value.code == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "again"), [("demo", True), ("data", True), ("train", False), ("probe", False)])
def test_after_ctrl_c_only_what_is_true_is_promised(
    verb: str, again: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`loka probe` and `loka train` need --resume, and say so themselves."""
    app = typer.Typer()
    app.callback()(cli.start)

    @app.command(verb)
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as end:
        cli.main([verb])
    assert end.value.code == 130
    assert ("run the same command again" in capsys.readouterr().err) == again


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that takes options, with the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, verb in command.commands.items():
        yield from leaves(verb, (*words, name))


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_help_cuts_no_word_off(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words, command in leaves(typer.main.get_command(cli.app)):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        text = capsys.readouterr().out
        missing = [name for option in command.params for name in option.opts if name not in text]
        assert not missing, f"{' '.join(words)} at {columns} columns does not show {missing}"
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        if columns < cli.WIDE and len(words) == 1:  # the examples of a group are in the group's help
            assert all(line in text for line, _ in cli.examples_of(words[0]))  # in one line, to be copied


def test_a_closed_pipe_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.callback()
    def start() -> None:
        """A group."""

    @app.command()
    def talk() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # typer puts a wrapper in its place
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as end:
        cli.main(["talk"])
    assert end.value.code == 141
