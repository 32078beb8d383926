"""cli: one verb per file, thin; heavy imports happen inside the command, so that `loka --help` is quick.

stdout is data, stderr is talk. Exit 0: fine. 1: a finding. 2: a request that cannot be honoured, or an internal error. An error is one
message that says what was seen and what to do; `loka --debug VERB` shows where it came from. After Ctrl-C a verb that kept something says how to go on.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from loka import __version__

__all__ = ["app", "main"]

# verb -> "module:object"; a Typer is a group of verbs, a function is one
VERBS = {
    "demo": "loka.cli.demo:demo",
    "tune": "loka.cli.tune:tune",
    "train": "loka.cli.train:train",
    "data": "loka.cli.data:app",
    "probe": "loka.cli.probe:probe",
    "mods": "loka.cli.mods:app",
    "plan": "loka.cli.plan:plan",
    "explain": "loka.cli.plan:explain",
    "diff": "loka.cli.plan:diff",
    "translate": "loka.cli.plan:translate",
    "convert": "loka.cli.convert:convert",
    "db": "loka.cli.db:app",
    "quantize": "loka.cli.quantize:quantize",
    "export": "loka.cli.export:export",
    "generate": "loka.cli.generate:generate",
    "serve": "loka.cli.serve:serve",
    "load": "loka.cli.load:load",
    "analyze": "loka.cli.analyze:analyze",
    "ab": "loka.cli.ab:ab",
    "report": "loka.cli.report:report",
    "bench": "loka.cli.bench:app",
    "simulate": "loka.cli.simulate:simulate",
    "doctor": "loka.cli.doctor:doctor",
}

# How `loka --help` groups them: in the order of the work
_PANELS = {
    **dict.fromkeys(("demo", "tune", "report", "doctor"), "Start"),
    **dict.fromkeys(("data", "train"), "Data and training"),
    **dict.fromkeys(("probe", "mods", "plan", "explain", "diff", "translate", "convert"), "Look, choose, convert"),
    **dict.fromkeys(("quantize", "export", "generate", "serve", "load", "analyze", "ab"), "Serving"),
    **dict.fromkeys(("bench", "db", "simulate"), "Speed"),
}

INTERRUPTED = 130  # what a shell expects after Ctrl-C
_CONTINUED = ("demo", "data", "tune")  # verbs that go on where they were when they are called again as they were

app = typer.Typer(
    name="loka",
    help="FP8 that is practical for recommendation models: probe, choose, convert, with the evidence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="[dim]Start with[/dim] loka demo[dim], then[/dim] loka tune --help[dim]. Completion of this shell:[/dim] loka --install-completion",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the verb."""
    context.obj["debug"] = debug
    context.obj["verb"] = context.invoked_subcommand


def examples_of(verb: str) -> list[tuple[str, str]]:
    """(command, remark) of every example in the docstring of the verb's file: indented lines that start with `loka VERB`."""
    module = import_module(VERBS[verb].partition(":")[0])
    found = []
    for line in (module.__doc__ or "").splitlines():
        words = re.split(r"\s{2,}(?:# )?", line.strip(), maxsplit=1)
        if words[0] == f"loka {verb}" or words[0].startswith(f"loka {verb} "):
            found.append((words[0], words[1] if len(words) > 1 else ""))
    return found


def _write_examples(verb: str) -> str | None:
    """The end of `loka VERB --help`."""
    lines = [
        f"  {_escape(command)}" + (f"  [dim]{_escape(remark)}[/dim]" if remark else "")
        for command, remark in examples_of(verb)
    ]
    return "\n\n".join(["[bold]Examples[/bold]", *lines]) if lines else None


def _escape(text: str) -> str:
    """Square brackets are markup here."""
    return text.replace("[", "\\[")


def _mount() -> None:
    for verb, home in VERBS.items():
        module, _, name = home.partition(":")
        found: Any = getattr(import_module(module), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb, epilog=_write_examples(verb), rich_help_panel=_PANELS.get(verb))
        else:
            app.command(verb, epilog=_write_examples(verb), rich_help_panel=_PANELS.get(verb))(found)


_mount()


# Newer typers carry a click of their own, older ones use the installed one: either way a bad parameter descends from it.
_COMMAND_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the exit code."""
    state: dict[str, Any] = {"debug": False, "verb": None}
    if (own_code := sys.modules.get("loka.cli.own_code")) is not None:
        own_code.forget()  # what an earlier command of this process named
    try:
        code = app(arguments, standalone_mode=False, obj=state)
    except _COMMAND_ERROR as error:
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if state["debug"]:
            raise
        typer.echo(_explain(error), err=True)
        sys.exit(2)
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this
        again = "; run the same command again to continue" if state["verb"] in _CONTINUED else ""
        typer.echo(f"interrupted{again}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> str:
    """What went wrong: a user's own code, the request (ValueError), a file, or, when it is none of these, something to report."""
    own_code = sys.modules.get("loka.cli.own_code")  # not loaded: no user's code has run
    if own_code is not None and (place := own_code.blame(error)) is not None:
        return f"error: your code raised {type(error).__name__}: {error}\n  {place}\nhint: loka --debug shows the calls that led there"
    if isinstance(error, ValueError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror or error}"
    if type(error).__name__ == "SafetensorError":  # it names no file
        return f"error: a file cannot be read: {error}\nhint: loka --debug shows which"
    if isinstance(error, FileNotFoundError):  # raised by a library, with the name in its words
        return f"error: {error}"
    return f"internal error: {type(error).__name__}: {error}\nhint: loka --debug shows where"
