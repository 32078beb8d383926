"""Callbacks of `TuneDuringTraining` for Hugging Face's Trainer and for Lightning, imported only when one is created.

Both count optimizer steps and not batches, so gradient accumulation needs no setting. What a framework wraps around the
model (DDP, torch.compile, autocast) stays valid, since modules are converted in place.
"""

from importlib import import_module
from typing import Any

from loka.integrations.during import TuneDuringTraining


def hf_callback(tuning: TuneDuringTraining) -> Any:
    """Create a `transformers.TrainerCallback`.

    Args:
        tuning: when and how to tune; its step is usually `lambda model, batch: model(**batch).loss`.

    Returns:
        The callback, for `Trainer(callbacks=[...])` or `trainer.add_callback`.

    Raises:
        ValueError: transformers is not installed.

    Example:
        >>> trainer.add_callback(hf_callback(tuning))
    """
    base = _require("transformers", "TrainerCallback", "hf")

    class TuneCallback(base):  # type: ignore[misc, valid-type]
        """Tunes after an optimizer step; applies the saved plan if a run is resumed after it was tuned."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tuning.resume(kwargs["model"], state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tuning.begin_step(kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tuning.end_step(kwargs["model"])

    return TuneCallback()


def lightning_callback(tuning: TuneDuringTraining) -> Any:
    """Create a `lightning.Callback`, for automatic and manual optimization.

    Args:
        tuning: when and how to tune. With `part`, it tunes that submodule of the LightningModule; otherwise the
            LightningModule itself, whose forward must then be called in a step.

    Returns:
        The callback, for `Trainer(callbacks=[...])`.

    Raises:
        ValueError: neither lightning nor pytorch_lightning is installed.

    Example:
        >>> L.Trainer(callbacks=[lightning_callback(tuning)])
    """
    base = _require("lightning", "Callback", "lightning", "pytorch_lightning")

    class TuneCallback(base):  # type: ignore[misc, valid-type]
        """Tunes after the batch that completes an optimizer step."""

        steps = 0
        open = False

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.steps, self.open = trainer.global_step, False
            tuning.resume(pl_module, trainer.global_step)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not self.open:  # accumulated batches belong to the same step
                self.open = True
                tuning.begin_step(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step > self.steps:
                self.steps, self.open = trainer.global_step, False
                tuning.end_step(pl_module)

    return TuneCallback()


def _require(module: str, name: str, extra: str, *others: str) -> Any:
    """Import a class of an optional library, or raise with the command that installs it."""
    problems = []
    for candidate in (module, *others):
        try:
            return getattr(import_module(candidate), name)
        except ImportError as error:
            problems.append(str(error))
    raise ValueError(f"{module} cannot be imported ({problems[0]}); install: pip install 'loka[{extra}]'")
