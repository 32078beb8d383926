"""The training loop.

    trainer = Trainer(model, data, TrainConfig(steps=1000), callbacks=[Progress()], out="runs/x")
    result = trainer.fit()

One step: draw `accumulate` batches, forward and backward each, clip, update dense parameters and tables, count. Then,
when due: a log line, an evaluation, a checkpoint. Everything else is a callback or another module of this room.

It does not wrap the model. For several processes pass a DistributedDataParallel model on each. The loop gives each rank
its share of the data, logs and saves on rank 0, and decides together about bad batches and stopping.

A loss that is not finite ends the run with NonFiniteLossError, naming step and batch, or is skipped and counted if
`max_bad_batches` allows. On a CPU (and always when skipping) it is noticed before the update; on a GPU at the next log
line, evaluation or checkpoint, since reading every loss would stall the device. Nothing bad is ever saved: losses and
weights are checked before a checkpoint.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from loka.training.callbacks import Callback, LogLine
from loka.training.checkpoint import Saver, find_checkpoints, read_best
from loka.training.compilation import CompileChoice, compiled
from loka.training.config import TrainConfig, learning_rate_factor
from loka.training.evaluation import LossFn, evaluate, ranking_loss
from loka.training.monitor import Monitor
from loka.training.optimizers import Optimizers
from loka.training.precision import autocast, check_precision, precision_scope, resolve_device
from loka.training.ranks import Ranks, keep_local, unwrap
from loka.training.result import NonFiniteLossError, TrainResult
from loka.training.snapshot import find_nonfinite, load_weights, restore_newest, seed_everything, take_snapshot
from loka.training.stream import EpochStream, TrainData
from loka.training.window import Window


class Trainer:
    """A run in progress; `fit()` drives it to the end. Its counters are public, for callbacks to read.

    Args:
        model: the model, or a DistributedDataParallel wrapper of it.
        data: train and valid splits.
        config: settings of the run.
        loss_fn: (model, batch) -> a scalar loss, and logits or None.
        evaluate_fn: model -> metrics; None computes loss, NE and AUC on the valid split.
        callbacks: observers of the run.
        out: folder for checkpoints.

    Example:
        >>> Trainer(model, data, TrainConfig(steps=5, batch_size=64), out="runs/x").fit(resume=True)
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainData,
        config: TrainConfig | None = None,
        *,
        loss_fn: LossFn = ranking_loss,
        evaluate_fn: Callable[[nn.Module], dict[str, float]] | None = None,
        callbacks: Sequence[Callback] = (),
        out: str | Path | None = None,
    ) -> None:
        self.config = config or TrainConfig()
        self.device = resolve_device(self.config.device)
        check_precision(self.config.precision, self.device)
        self.ranks = Ranks.find()
        self.model, self.module = model, unwrap(model).to(self.device)
        self.data, self.loss_fn, self.evaluate_fn = data, loss_fn, evaluate_fn
        self.optimizers = Optimizers(self.module, self.config)
        self.stream = EpochStream(
            data.train, self.config.batch_size, seed=self.config.seed, rank=self.ranks.rank, world=self.ranks.world
        )
        self.monitor = Monitor(self.config)
        self.callbacks = [callback for callback in callbacks if self.ranks.rank == 0 or callback.every_rank]
        if len({callback.name for callback in self.callbacks}) != len(self.callbacks):
            raise ValueError(f"callback names must differ, got {[callback.name for callback in self.callbacks]}")
        self.folder = None if out is None else Path(out) / "checkpoints"
        if self.config.checkpoint_every and self.folder is None:
            raise ValueError("checkpoint_every needs a folder: pass out=")
        self.step = self.examples = self.batches = self.bad_batches = 0
        self.train_seconds = 0.0
        self.metrics: dict[str, float] = {}
        self.loss = math.nan
        self.compile_choice = CompileChoice(False, "not started")
        self._best_weights: dict[str, Tensor] | None = None
        self._window = Window()
        self._window_start = 0.0
        self._saver: Saver | None = None
        self._saved_step: int | None = None
        self._resumed_from: int | None = None
        self._damaged: tuple[str, ...] = ()

    def fit(self, *, resume: bool = False, fallback: bool = False) -> TrainResult:
        """Train to `config.steps` or an early stop.

        Args:
            resume: continue from the newest checkpoint of `out`, or from the start if there is none.
            fallback: if the newest checkpoint is damaged, use an older one instead of raising. The result lists those
                that were skipped.

        Returns:
            The outcome of the run.
        """
        with (
            precision_scope(self.config.precision, self.device),
            compiled(self.module, self.config.compile, self.device) as self.compile_choice,
        ):
            self._start(resume, fallback)
            for callback in self.callbacks:
                callback.on_start(self)
            self._window_start = time.perf_counter()
            try:
                self._run()
                if self._saver is not None:
                    self._saver.wait()
            except BaseException as error:
                self._fail(error)
                raise
        result = self._result()
        for callback in self.callbacks:
            callback.on_end(self, result)
        return result

    def load_best(self) -> None:
        """Load the weights of the best evaluation into the model."""
        if self.folder is not None:
            load_weights(self.module, read_best(self.folder))
        elif self._best_weights is not None:
            self.module.load_state_dict(self._best_weights)
        else:
            raise ValueError("there is no best evaluation yet: set evaluate_every and train first")

    def evaluate(self, split: Any = None) -> dict[str, float]:
        """Return metrics on a split (by default the validation split), in the precision of the run."""
        if split is None and self.evaluate_fn is not None:
            return self.evaluate_fn(self.module)
        split = self.data.valid if split is None else split
        if split is None:
            raise ValueError("nothing to evaluate on: the data have no valid split; set evaluate_every=0")
        with precision_scope(self.config.precision, self.device), autocast(self.config.precision, self.device):
            return evaluate(
                self.module,
                split,
                batch_size=self.config.evaluate_batch_size or self.config.batch_size,
                device=self.device,
                loss_fn=self.loss_fn,
                compiled_size=self.config.batch_size if self.compile_choice.enabled else None,
                rank=self.ranks.rank,
                world=self.ranks.world,
            )

    def _find_checkpoints(self, resume: bool) -> list[Path]:
        """Return the checkpoints to resume from. Those of another run are an error."""
        found = [] if self.folder is None else find_checkpoints(self.folder)
        if resume and self.folder is None:
            raise ValueError("resume needs the folder of the run: pass out=")
        if found and not resume and self.step == 0:
            raise ValueError(
                f"{self.folder} already holds {found[-1].name}; expected a new folder; hint: --resume (resume=True) continues that run"
            )
        return found

    def _start(self, resume: bool, fallback: bool) -> None:
        found = self._find_checkpoints(resume)
        if self.folder is not None and self.ranks.rank == 0:
            self._saver = Saver(self.folder, keep=self.config.keep)
        if self.step == 0:
            seed_everything(self.config.seed + self.ranks.rank)
            if found:
                self._resumed_from, self._damaged = restore_newest(self, found, fallback=fallback)
                self._saved_step = self._resumed_from

    def _run(self) -> None:
        config = self.config
        self.module.train()
        while self.step < config.steps and not self.monitor.gives_up:
            for callback in self.callbacks:
                callback.on_step_begin(self)
            self._train_step()
            log = self._log() if self._is_due(config.log_every) else None
            for callback in self.callbacks:
                callback.on_step_end(self, log)
            improved = self._evaluate() if self._is_due(config.evaluate_every) else False
            if self.folder is not None and (improved or self.monitor.gives_up or self._is_due(config.checkpoint_every)):
                self._checkpoint()
        if self.folder is not None:
            self._checkpoint()
        if self._window.examples:
            self._log()

    def _is_due(self, every: int) -> bool:
        """Return True at every n-th step and the last one; never for 0."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.steps)

    def _fail(self, error: BaseException) -> None:
        """Finish writing the checkpoint in flight, then notify the callbacks. The error itself is not hidden."""
        if self._saver is not None:
            try:
                self._saver.wait()
            except RuntimeError as second:
                error.add_note(str(second))
        for callback in self.callbacks:
            callback.on_error(self, error)

    def _train_step(self) -> None:
        self.optimizers.set_factor(learning_rate_factor(self.config, self.step))
        self.optimizers.zero_grad()
        for micro in range(self.config.accumulate):
            with keep_local(self.model) if micro + 1 < self.config.accumulate else nullcontext():
                self._accumulate_batch()
        if self.config.clip_norm is not None and self.optimizers.dense:
            nn.utils.clip_grad_norm_(self.optimizers.dense, self.config.clip_norm)
        self.optimizers.step()
        if (update_balance := getattr(self.module, "update_balance", None)) is not None:  # mixture of experts
            update_balance()
        self.step += 1

    def _accumulate_batch(self) -> None:
        """Add the gradient of the next batch whose loss is finite."""
        checks_now = self.device.type == "cpu" or self.config.max_bad_batches > 0
        while True:
            batch = next(self.stream).to(self.device, non_blocking=True)
            self.batches += 1
            with autocast(self.config.precision, self.device):
                loss, predictions = self.loss_fn(self.model, batch)
            if loss.ndim != 0:
                raise ValueError(f"the loss function must return a scalar, got shape {tuple(loss.shape)}")
            if not checks_now or not self.ranks.any(not math.isfinite(loss.item()), self.device):
                break
            self.bad_batches += 1
            if self.bad_batches > self.config.max_bad_batches:
                raise self._bad_loss(self.step, self.batches - 1)
        (loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
        self.examples += batch.size * self.ranks.world
        labels = None if predictions is None else batch.labels
        self._window.add(self.step, self.batches - 1, loss, batch.size * self.ranks.world, labels)

    def _bad_loss(self, step: int, batch: int) -> NonFiniteLossError:
        kept = "none was saved" if self._saved_step is None else f"step {self._saved_step} of {self.folder}"
        return NonFiniteLossError(
            f"the loss is not finite at step {step}, batch {batch} of the run (both counted from 0; data now at "
            f"{self.stream.state_dict()}; {self.bad_batches} bad batches seen, {self.config.max_bad_batches} allowed). "
            f"Last good checkpoint: {kept}. Lower the learning rate, set clip_norm, or look for bad values in the data"
        )

    def _check_losses(self) -> None:
        """Wait for the device and raise if any loss of the window is not finite."""
        bad = self._window.find_bad()
        if self.ranks.any(bad is not None, self.device):
            raise self._bad_loss(*(bad or (self.step - 1, self.batches - 1)))

    def _log(self) -> LogLine:
        self._check_losses()
        now = time.perf_counter()
        elapsed, window = now - self._window_start, self._window
        self.train_seconds += elapsed
        self.loss = window.loss()
        rate = self.config.learning_rate * learning_rate_factor(self.config, self.step - 1)
        line = LogLine(
            self.step, self.loss, window.ne(), rate, self.examples, window.examples / elapsed, self.train_seconds
        )
        self._window, self._window_start = Window(), now
        return line

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Exclude the time of the block, and of what is queued before it, from the speed of training."""
        self._check_losses()
        start = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - start

    def _evaluate(self) -> bool:
        """Evaluate, and return whether it is the best so far."""
        with self._paused():
            self.metrics = self.evaluate()
            improved = self.monitor.update(self.step, self.metrics)
            if improved and self.folder is None:
                self._best_weights = {k: v.detach().to("cpu", copy=True) for k, v in self.module.state_dict().items()}
            for callback in self.callbacks:
                callback.on_evaluate(self, self.metrics)
        return improved

    def _checkpoint(self) -> None:
        if self._saved_step == self.step:
            return
        with self._paused():
            if bad := find_nonfinite(self.module):
                raise NonFiniteLossError(
                    f"weights of {bad[:5]} are not finite after step {self.step}; nothing was saved"
                )
            if self._saver is not None:
                self._saver.save(take_snapshot(self))
            self._saved_step = self.step

    def _result(self) -> TrainResult:
        return TrainResult(
            steps=self.step,
            examples=self.examples,
            seconds=self.train_seconds,
            examples_per_s=self.examples / self.train_seconds if self.train_seconds else 0.0,
            loss=self.loss,
            metrics=self.metrics,
            best=self.monitor.best,
            stopped_early=self.step < self.config.steps,
            bad_batches=self.bad_batches,
            device=str(self.device),
            precision=self.config.precision,
            compile=self.compile_choice,
            resumed_from=self._resumed_from,
            damaged=self._damaged,
            checkpoint=None if self._saver is None else self._saver.last,
        )
