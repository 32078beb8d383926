"""The command line. One file per verb; heavy imports happen inside the command, so that `loka --help` is fast.

Results go to stdout, progress and messages to stderr. Exit codes: 0 success, 1 a finding (the verb's docstring says
which), 2 an invalid request or an internal error, 130 interrupted. An error is one message that says what was seen and
what to do; `loka --debug VERB` shows the traceback. After Ctrl-C, a verb whose work was saved says how to continue. A
reader that closes the pipe (`| head`) ends a verb with 141, as a shell expects of SIGPIPE.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from loka import __version__

__all__ = ["app", "main"]

# verb -> "module:object", where object is a function or, for a group of subcommands, a Typer
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

# Panels of `loka --help`, in the order of the workflow
_PANELS = {
    **dict.fromkeys(("demo", "tune", "report", "doctor"), "Start"),
    **dict.fromkeys(("data", "train"), "Data and training"),
    **dict.fromkeys(("probe", "mods", "plan", "explain", "diff", "translate", "convert"), "Inspect, choose, convert"),
    **dict.fromkeys(("quantize", "export", "generate", "serve", "load", "analyze", "ab"), "Serving"),
    **dict.fromkeys(("bench", "db", "simulate"), "Speed"),
}

INTERRUPTED = 130  # what a shell expects after Ctrl-C
CLOSED = 141  # and after a closed pipe
WIDE = 100  # columns from which tables of options have room for the longest name; below, rich would cut names off
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a disk answers, and no fault of this program
_CONTINUED = ("demo", "data", "tune")  # verbs that continue when the same command is run again

app = typer.Typer(
    name="loka",
    help="Practical FP8 for recommendation models: probe, choose, convert, and keep the evidence.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # verbs inherit it
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="[dim]Start with[/dim] loka demo[dim], then[/dim] loka tune --help[dim]. Shell completion:[/dim] loka --install-completion",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Handle the options that come before the verb."""
    context.obj["debug"] = debug
    context.obj["verb"] = context.invoked_subcommand


def examples_of(verb: str) -> list[tuple[str, str]]:
    """Return (command, remark) for every line of the verb's module docstring that starts with `loka VERB`."""
    module = import_module(VERBS[verb].partition(":")[0])
    found = []
    for line in (module.__doc__ or "").splitlines():
        words = re.split(r"\s{2,}(?:# )?", line.strip(), maxsplit=1)
        if words[0] == f"loka {verb}" or words[0].startswith(f"loka {verb} "):
            found.append((words[0], words[1] if len(words) > 1 else ""))
    return found


def _write_examples(verb: str) -> str | None:
    """Return the examples at the end of `loka VERB --help`."""
    lines = [
        f"  {_escape(command)}" + (f"  [dim]# {_escape(remark)}[/dim]" if remark else "")
        for command, remark in examples_of(verb)
    ]
    return "\n\n".join(["[bold]Examples[/bold]", *lines]) if lines else None


def _escape(text: str) -> str:
    """Escape square brackets, which rich reads as markup."""
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


def _make_command() -> Any:
    """Return the command to run. On a narrow terminal its verbs explain their options without tables."""
    command = typer.main.get_command(app)
    if shutil.get_terminal_size().columns < WIDE:
        _explain_plainly(command)
    return command


def _explain_plainly(command: Any) -> None:
    if hasattr(command, "commands"):  # a group: its table of verbs has room
        for verb in command.commands.values():
            _explain_plainly(verb)
        return
    command.rich_markup_mode = None
    if command.epilog:
        from rich.markup import render

        # \b: do not wrap, so that a command can be copied
        command.epilog = "\n\n".join(f"\b\n{line}" for line in render(command.epilog).plain.split("\n\n"))


# Newer versions of typer vendor click, older ones import it; BadParameter derives from the right ClickException.
_COMMAND_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code.

    Args:
        arguments: the words after `loka`; default: those of this process.

    Example:
        >>> main(["doctor", "--json"])  # doctest: +SKIP
    """
    state: dict[str, Any] = {"debug": False, "verb": None}
    if (own_code := sys.modules.get("loka.cli.own_code")) is not None:
        own_code.forget()  # modules named by an earlier command in this process
    try:
        code = _make_command()(arguments, standalone_mode=False, obj=state)
    except _COMMAND_ERROR as error:
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:
        code = INTERRUPTED
    except SystemExit as end:
        cause = end.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EPIPE:  # typer ends with 1, which is a finding here
            sys.exit(CLOSED)
        raise
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
    """Return the message for an error: in the user's code, in the request (ValueError), in a file, or internal."""
    own_code = sys.modules.get("loka.cli.own_code")  # not loaded if no user code has run
    if own_code is not None and (place := own_code.blame(error)) is not None:
        return f"error: your code raised {type(error).__name__}: {error}\n  {place}\nhint: loka --debug shows the calls that led there"
    if isinstance(error, ValueError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror or error}"
    if isinstance(error, OSError) and error.errno in _DISK:  # of a write, which names no file
        return f"error: {os.strerror(error.errno)}\nhint: loka --debug shows where"
    if type(error).__name__ == "SafetensorError":  # it names no file
        return f"error: a file cannot be read: {error}\nhint: loka --debug shows which"
    if isinstance(
        error, FileNotFoundError
    ):  # without `filename`: raised by a library that puts the name in its message
        return f"error: {error}"
    return f"internal error: {type(error).__name__}: {error}\nhint: loka --debug shows where"
