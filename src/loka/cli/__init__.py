"""cli: one verb per file, thin; heavy imports happen inside the command, so that `loka --help` is quick.

stdout is data, stderr is talk. Exit 0: fine. 1: a finding. 2: a request that cannot be honoured, or an internal error. An error is one
message that says what was seen and what to do; `loka --debug VERB` shows where it came from. Ctrl-C leaves a state to continue from.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import click
import typer

from loka import __version__

__all__ = ["app", "main"]

# verb -> "module:object"; a Typer is a group of verbs, a function is one
VERBS = {
    "demo": "loka.cli.demo:demo",
    "train": "loka.cli.train:train",
    "data": "loka.cli.data:app",
    "probe": "loka.cli.probe:probe",
    "mods": "loka.cli.mods:app",
    "plan": "loka.cli.plan:plan",
    "explain": "loka.cli.plan:explain",
    "diff": "loka.cli.plan:diff",
    "export": "loka.cli.plan:export",
    "convert": "loka.cli.convert:convert",
    "db": "loka.cli.db:app",
    "quantize": "loka.cli.quantize:quantize",
    "generate": "loka.cli.generate:generate",
    "analyze": "loka.cli.analyze:analyze",
    "ab": "loka.cli.ab:ab",
    "report": "loka.cli.report:report",
    "bench": "loka.cli.bench:app",
    "doctor": "loka.cli.doctor:doctor",
}

INTERRUPTED = 130  # what a shell expects after Ctrl-C

app = typer.Typer(
    name="loka",
    help="FP8 that is practical for recommendation models: probe, choose, convert, with the evidence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
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


def _mount() -> None:
    for verb, home in VERBS.items():
        module, _, name = home.partition(":")
        found: Any = getattr(import_module(module), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)


_mount()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the exit code."""
    state: dict[str, Any] = {"debug": False}
    try:
        code = app(arguments, standalone_mode=False, obj=state)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        code = INTERRUPTED
    except ValueError as error:
        if state["debug"]:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Exception as error:  # not the user's fault: say so, and how to report it
        if state["debug"]:
            raise
        typer.echo(f"internal error: {type(error).__name__}: {error}\nhint: loka --debug shows where", err=True)
        sys.exit(2)
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this
        typer.echo("interrupted; run the same command again to continue", err=True)
    sys.exit(code if isinstance(code, int) else 0)
