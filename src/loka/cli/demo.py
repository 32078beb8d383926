"""`loka demo`: run the whole workflow in one command, on the embedded real data.

    loka demo
    loka demo --out runs/mine --steps 800 --seed 3

Trains a small Wukong (on a GPU a wide DLRM), tunes it (`loka.tune`), continues training in planned FP8 (emulated on a
CPU) and in naive FP8, compares the results, estimates the gain of FP8 on an H200, and writes OUT/report.html. If it was
interrupted, running it again continues. With other settings, what is in OUT is moved to OUT/earlier-1 first.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import claim_folder

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from loka.data.progress import Progress

TELL_EVERY = 30.0  # seconds between log lines about the same station
_LABELS = {
    "train": "train in float32",
    "tune": "tune",
    "size": "estimate speeds on a GPU",
    "swap": "swap FP8 into the checkpoint",
    "high": "continue in float32",
    "control": "continue in float32 once more",
    "planned": "continue in planned FP8",
    "naive": "continue in naive FP8",
    "compare": "compare on the test split",
    "report": "write the report",
}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, records and the report.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(help="Steps in float32 before the runs fork; default: 400 on a CPU, 120 on a GPU.")
    ] = None,
    more_steps: Annotated[
        int | None, typer.Option(help="Steps of each run after the fork; default: 200 on a CPU, 40 on a GPU.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Model size. CPU (Wukong): tiny, small (default), wide, plain. GPU (DLRM): tiny, small, large, wide (default)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and resampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; speed is measured on a GPU only.")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train, tune, continue in FP8, compare and report, on real data, in under three minutes on two cores."""
    from loka.cli.subject import find_device
    from loka.demo import Demo, DemoConfig

    claim_folder("--out", out)
    given = {"steps": steps, "more_steps": more_steps, "size": size, "seed": seed, "device": str(find_device(device))}
    config = DemoConfig.for_device(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    words = ["loka", "demo", *_spell(given), *(["--out", str(out)] if out != Path("runs/demo") else [])]
    with _talking() as talk:
        result = Demo(out, config, talk=talk, command=shlex.join(words)).run()
    if result.restarted:
        typer.echo(result.restarted, err=True)
    if result.resumed:
        typer.echo(f"already finished: {', '.join(result.resumed)}", err=True)
    if json_:
        typer.echo(json.dumps(_to_json(result), indent=1))
    else:
        typer.echo("\n".join(result.lines()))


def _spell(given: dict[str, Any]) -> list[str]:
    """Return the given options as words of a command line, without the default seed and device."""
    return [
        word
        for name, value in given.items()
        if value is not None and (name, value) not in (("seed", 0), ("device", "cpu"))
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _to_json(result: Any) -> dict[str, Any]:
    import msgspec

    return {
        "report": str(result.report),
        "converted": result.converted,
        "linears": result.linears,
        "low_precision_flops_share": result.share,
        "low_precision_flops_share_elsewhere": result.sizes and result.sizes.here.share,
        "environment": msgspec.to_builtins(result.plan.environment),
        "comparisons": {name: msgspec.to_builtins(found) for name, found in result.comparisons.items()},
        "tuning": {"verdict": result.tuning.verdict, "seconds": result.tuning.seconds},
        "estimate": None if result.sizes is None else msgspec.to_builtins(result.sizes),
        "resumed": list(result.resumed),
        "restarted": result.restarted,
    }


@contextmanager
def _talking() -> Iterator["Progress"]:
    """Yield a progress callback: bars in a terminal, lines in a log."""
    if sys.stderr.isatty():
        from loka.data.progress import make_bar

        with make_bar() as bar:
            yield _Talk(bar)
    else:
        yield Lines()


class Lines:
    """Log a line when a station begins, and one every `TELL_EVERY` seconds while it runs."""

    def __init__(self) -> None:
        self._station, self._begun, self._told = "", time.monotonic(), 0.0

    def __call__(self, station: str, done: int, total: int | None) -> None:
        """Report the progress of a station; `total` is None if unknown."""
        now = time.monotonic()
        if station == self._station and now - self._told < TELL_EVERY:
            return
        count = f" {done} of {total}" if total and station == self._station else ""
        typer.echo(f"{now - self._begun:5.0f} s  {_LABELS.get(station, station)}{count}", err=True)
        self._station, self._told = station, now


class _Talk:
    """Show one bar per station, updated at most ten times a second."""

    def __init__(self, bar: "Bar") -> None:
        self._bar, self._task, self._station, self._drawn = bar, None, "", 0.0  # type: Bar, Any, str, float

    def __call__(self, station: str, done: int, total: int | None) -> None:
        if station != self._station:
            if self._task is not None:
                self._finish()
            self._station = station
            self._task = self._bar.add_task(_LABELS.get(station, station), total=total)
        now = time.monotonic()
        if now - self._drawn > 0.1 or done == total:
            self._bar.update(self._task, completed=done, total=total)
            self._drawn = now

    def _finish(self) -> None:
        task = self._bar.tasks[self._task]
        self._bar.update(self._task, total=task.total or 1, completed=task.total or 1)
