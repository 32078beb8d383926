"""Callbacks that report the progress of a run: a curve in memory, a JSONL file, a progress bar, TensorBoard.

The JSONL file has one object per log step (`step`, `loss`, `ne`, `lr`, `examples`, `examples_per_s`, `seconds`) and one
per evaluation (`step`, `evaluation`: metrics). A run that fails writes a last line (`step`, `error`). Values that are
NaN or unknown are null. On resume, lines after the checkpoint and an incomplete last line are removed, so the file
reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loka.records import write_atomically
from loka.training.callbacks import Callback, CallbackState, LogLine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from loka.training.result import TrainResult
    from loka.training.trainer import Trainer


class Curve(Callback):
    """Collects the log lines of the whole run, including parts before a resume.

    Example:
        >>> Trainer(model, data, TrainConfig(steps=5, batch_size=64), callbacks=[curve := Curve()]).fit()
    """

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Keep a log step."""
        if log is not None:
            self.lines.append(log)

    def on_checkpoint(self, trainer: Trainer) -> CallbackState:
        """Return the lines so far."""
        return CallbackState(values={"lines": [asdict(line) for line in self.lines]})

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """Continue the curve."""
        self.lines = [LogLine(**line) for line in state.values["lines"]]


class JsonlLog(Callback):
    """Writes one line of JSON per log step and evaluation to a file, flushed at once.

    Args:
        path: the file; in a resumed run it is continued.

    Example:
        >>> JsonlLog("runs/x/log.jsonl")
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Keep the lines up to the resumed step, remove the rest."""
        kept = [line for line in _read_lines(self.path) if json.loads(line)["step"] <= trainer.step]
        write_atomically(self.path, "".join(f"{line}\n" for line in kept if trainer.step).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Write a log step."""
        if log is not None:
            self._write({"lr" if name == "learning_rate" else name: value for name, value in asdict(log).items()})

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self._write({"step": trainer.step, "evaluation": {name: _finite(value) for name, value in metrics.items()}})

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Close the file."""
        self._close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Write what ended the run, and close the file."""
        self._write({"step": trainer.step, "error": f"{type(error).__name__}: {error}"})
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open: JsonlLog writes between on_start and on_end only")
        self._file.write(json.dumps({name: _finite(value) for name, value in values.items()}) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_lines(path: Path) -> list[str]:
    """Return complete lines: if the process was killed, the last one may be incomplete."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


class Progress(Callback):
    """Loss, NE, examples per second, time left: a bar in a terminal, elsewhere a line per log step. Evaluations are lines.

    Args:
        console: where to show it; None: on stderr.

    Example:
        >>> Trainer(model, data, TrainConfig(steps=5, batch_size=64), callbacks=[Progress()]).fit()
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._shown: dict[str, Any] = {"loss": "-", "ne": "", "speed": "-"}

    def on_start(self, trainer: Trainer) -> None:
        """Show the bar, at the resumed step if there is one."""
        self._console = console = self._console or _stderr()
        if not console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}{task.fields[ne]}  {task.fields[speed]} ex/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=trainer.config.steps, completed=trainer.step, **self._shown)
        self._bar.start()

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Advance the bar; on log steps update the numbers."""
        if log is not None:
            ne = "" if log.ne is None else f"  NE {log.ne:.4f}"  # sequence models have none
            self._shown.update(loss=f"{log.loss:.4f}", ne=ne, speed=f"{log.examples_per_s:,.0f}")
            if self._bar is None:
                self._tell(trainer, f"loss {log.loss:.4f}{ne}  {log.examples_per_s:,.0f} ex/s")
        self._draw(trainer.step)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Write the validation metrics."""
        names = [name for name in ("ne", "auc") if name in metrics] or list(metrics)[:2]
        self._tell(trainer, "valid " + " ".join(f"{name} {metrics[name]:.4f}" for name in names))

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Leave the finished bar on the screen."""
        self._close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Release the terminal."""
        self._close()

    def _tell(self, trainer: Trainer, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._console is not None:
            line = f"train {trainer.step}/{trainer.config.steps}  {text}"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _draw(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, **self._shown)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class TensorBoard(Callback):
    """Writes scalars for TensorBoard; needs the `tensorboard` package.

    Args:
        folder: folder of the event files.

    Example:
        >>> TensorBoard("runs/x/tensorboard")
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "TensorBoard logs need the tensorboard package; install: pip install 'loka[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Write training scalars, under `train/`."""
        if log is not None:
            values = {"loss": log.loss, "ne": log.ne, "lr": log.learning_rate, "examples_per_s": log.examples_per_s}
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(f"train/{name}", value, log.step)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Write validation scalars, under `valid/`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"valid/{name}", value, trainer.step)

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Flush and close."""
        self._writer.close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Flush and close."""
        self._writer.close()
