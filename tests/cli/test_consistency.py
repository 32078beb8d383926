"""All verbs behave alike: one line of help, examples, --json where there is data to read, completion by the shell."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer

from loka import cli

TEXT_ALREADY = {"translate", "db export"}  # what they print or write is another tool's format, or JSON itself
WANTED = (
    "data", "train", "probe", "plan", "explain", "diff", "convert", "mods", "bench", "quantize", "analyze", "generate", "serve", "load", "ab", "db",
    "export", "translate", "report", "doctor", "demo", "tune", "simulate",
)  # fmt: skip


def leaves() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for verb, found in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        for name, command in getattr(found, "commands", {"": found}).items():
            yield f"{verb} {name}".strip(), command


def test_every_verb_is_there() -> None:
    assert set(cli.VERBS) == set(WANTED)


@pytest.mark.parametrize(("name", "command"), list(leaves()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_has_help_and_json(name: str, command: typer.core.TyperCommand) -> None:
    assert command.help, f"loka {name} says nothing of itself"
    assert command.help.strip().splitlines()[0].endswith((".", "?"))
    options = {word for parameter in command.params for word in parameter.opts}
    assert "--json" in options or name in TEXT_ALREADY, f"loka {name} has no --json"
    silent = [p.name for p in command.params if not getattr(p, "help", None) and p.name != "help"]
    assert silent == [], f"loka {name}: no help for {silent}"


def test_options_of_data_have_one_name() -> None:
    """Where the data are is said in the same words by every verb that reads some."""
    names = {"root": "--data-root", "data_root": "--data-root", "source": "--source"}
    found = {(p.name, *p.opts) for _, command in leaves() for p in command.params if p.name in names}
    assert found == {(name, option) for name, option in names.items() if name != "root"} | {("root", "--data-root")}


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_help_has_the_usage_and_the_examples(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert "Usage" in said
    for command, _ in cli.examples_of(verb):
        assert command in said


def test_the_shell_completes_verbs() -> None:
    words = {"_LOKA_COMPLETE": "complete_bash", "COMP_WORDS": "loka pr", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'loka'; from loka.cli import app; app(prog_name='loka')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **words},
    )
    assert done.stdout.split() == ["probe"]
