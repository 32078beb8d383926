"""The stations of the demo. Each leaves records or a checkpoint, so that an interrupted demo can continue."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka import records
from loka.data import RankingData, load
from loka.data.progress import Progress as Talk
from loka.data.progress import silent
from loka.demo.config import DemoConfig, DemoResult
from loka.measure.device import name_device
from loka.metrics import AUC, LogLoss, NormalizedEntropy, compare_paired, log_losses
from loka.models import build_ranker, configure
from loka.placing import convert
from loka.records import Comparison, Conversion, Environment, Interval, Point, Progress, Run, capture_environment
from loka.records.tuning import SizeEstimate, SizeEstimates, Tuning
from loka.report import Results, write_html
from loka.report.render import require_charts
from loka.training import Callback, JsonlLog, TrainConfig, Trainer, find_checkpoints
from loka.training.checkpoint import Snapshot, read_checkpoint
from loka.tuning import Estimator, estimate_model, tune

ARMS = {"high": "high precision", "control": "control", "planned": "planned FP8", "naive": "naive FP8"}
COMPARED = ("planned", "naive", "control")
SWAPPED = ("planned", "naive")
FEW = 64  # rows of a batch that only serves to find the sizes of a model
NUDGE = 2.0**-9  # relative size of one bf16 rounding: far below FP8's 2^-4, far above float32's 2^-24


class StepTalk(Callback):
    """Reports how far a training station is."""

    def __init__(self, station: str, talk: Talk) -> None:
        self._station, self._talk = station, talk

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """Report one more step."""
        self._talk(self._station, trainer.step, trainer.config.steps)


class Demo:
    """A demo in one folder. `run` executes the stations that are not finished.

    Args:
        out: the folder.
        config: the settings.
        talk: called with the progress.
        command: the command line, for the records.
        load_data: opens the data set.

    Example:
        >>> Demo("runs/demo").run().report
    """

    def __init__(
        self,
        out: str | Path = "runs/demo",
        config: DemoConfig | None = None,
        *,
        talk: Talk = silent,
        command: str | None = None,
        load_data: Callable[[str], RankingData] = load,
    ) -> None:
        self.out, self.config, self._talk = Path(out), config or DemoConfig(), talk
        self._command, self._load_data = command, load_data
        self._loaded: RankingData | None = None
        self._done: list[str] = []
        self.restarted: str | None = None

    @property
    def stations(self) -> dict[str, Callable[[], None]]:
        """The jobs by station name, in order."""
        arms = {arm: (lambda arm=arm: self._train_arm(arm)) for arm in ARMS}
        return {
            "train": self._train,
            "tune": self._tune,
            **({} if self._on_gpu else {"size": self._size}),
            **arms,
            "swap": self._swap,
            "compare": self._compare,
            "report": self._report,
        }

    def run(self) -> DemoResult:
        """Run the stations that are not finished.

        Returns:
            The report and the records it is based on.
        """
        require_charts()
        for size in (self.config.size, self.config.large):
            configure(self.config.family, size)  # an unknown size is an error before anything is moved
        self._resume()
        resumed = tuple(self._done)
        for name, job in self.stations.items():
            if name not in self._done:
                self._talk(name, 0, None)
                job()
                self._done.append(name)
                self._save_progress()
        names = [*COMPARED, *(f"swap-{arm}" for arm in SWAPPED)]
        comparisons = {name: records.load(self._record(f"comparison-{name}"), Comparison) for name in names}
        sizes = self._record("sizes")
        return DemoResult(
            self.out / "report.html",
            records.load(self._record("tuning"), Tuning),
            comparisons,
            resumed,
            self.restarted,
            records.load(sizes, SizeEstimates) if sizes.exists() else None,
        )

    # Stations

    def _train(self) -> None:
        self._fit("train", self._build(), self.config.steps)

    def _tune(self) -> None:
        """Tune on validation batches. The arms convert by this plan."""
        model = self._build()
        model.load_state_dict(self._checkpoint("train").tensors["model"])
        batches = self._data.valid.batches(self.config.batch_size, shuffle=True, seed=self.config.seed)
        tuned = tune(
            model,
            [batch.to(self.config.device) for batch in islice(batches, self.config.tune_batches)],
            step=lambda m, batch: log_losses(m(batch).reshape(-1), batch.labels.reshape(-1)),
            margin=self.config.tune_margin,
            out=self.out / "tuning",
            progress=lambda phase, done, total: self._talk(f"tune: {phase}", done, total),
        )
        records.save(tuned.record, self._record("tuning"))

    def _size(self) -> None:
        """Estimate the gain of FP8 on a GPU, for this model and for one of a size that FP8 is meant for."""
        here, large = (self._estimate(size) for size in (self.config.size, self.config.large))
        sizes = SizeEstimates(
            target=self.config.target,
            method=str(Estimator(self.config.target)),
            here=here,
            large=large,
            environment=self._environment(),
        )
        records.save(sizes, self._record("sizes"))

    def _estimate(self, size: str) -> SizeEstimate:
        example = next(self._data.train.batches(FEW, shuffle=True, seed=self.config.seed))
        rows = self.config.large_rows
        model = build_ranker(self._data.schema, self.config.family, size)
        found = estimate_model(model, example, self.config.target, row_factor=rows / FEW)
        return SizeEstimate(size=size, rows=rows, linears=found.linears, share=found.share)

    def _train_arm(self, arm: str) -> None:
        model, snapshot = self._build(), self._checkpoint("train")
        model.load_state_dict(snapshot.tensors["model"])
        done = None
        if arm == "control":
            _nudge(model, self.config.seed)
        elif arm != "high":
            done = self._convert(model, arm)
            records.save(done, self.out / arm / "conversion.json")
        trainer = self._fit(arm, model, self.config.more_steps, fork=snapshot)
        self._talk(f"{arm}: test", 0, None)
        scores, metrics = self._score(model)
        _save_tensors(self.out / arm / "test.safetensors", scores)
        precision = (
            _PRECISIONS.get(arm)
            or f"{'auto' if arm == 'planned' else 'tensorwise'} FP8{'' if self._on_gpu else ' (emulated)'}, fp32 elsewhere"
        )
        run = Run(
            name=ARMS[arm],
            model=f"{self.config.family} {self.config.size}",
            data=self._data.name,
            precision=precision,
            seed=self.config.seed,
            steps=self.config.more_steps,
            examples=trainer.examples,
            seconds=trainer.train_seconds,
            curve=_read_curve(self.out / arm / "log.jsonl", offset=self.config.steps),
            metrics=metrics,
            low_precision_flops_share=_share(done),
            environment=self._environment(),
        )
        records.save(run, self._record(f"run-{arm}"))

    def _swap(self) -> None:
        """Convert the high-precision run's final weights to FP8, as when serving them, and compare the losses."""
        baseline = _load_tensors(self.out / "high" / "test.safetensors")
        for number, arm in enumerate(SWAPPED):
            self._talk("swap", number, len(SWAPPED))
            model = self._build()
            model.load_state_dict(self._checkpoint("high").tensors["model"])
            done = self._convert(model, arm)
            scores, _ = self._score(model)
            self._write_comparison(f"swap-{arm}", scores, baseline, f"{ARMS[arm]}, swapped in", _share(done))

    def _compare(self) -> None:
        scores = {arm: _load_tensors(self.out / arm / "test.safetensors") for arm in ARMS}
        for arm in COMPARED:
            share = 0.0 if arm == "control" else _share(records.load(self.out / arm / "conversion.json", Conversion))
            self._write_comparison(arm, scores[arm], scores["high"], ARMS[arm], share)

    def _write_comparison(
        self, name: str, candidate: dict[str, Tensor], baseline: dict[str, Tensor], label: str, share: float
    ) -> None:
        """Compare a run with the high-precision one and save the comparison."""
        found = compare_paired(
            candidate["losses"],
            baseline["losses"],
            margin=100 * self.config.margin,
            metric="log loss",
            lower_is_better=True,
            groups=baseline["group"],
            relative=True,
            seed=self.config.seed,
        )
        if torch.equal(candidate["losses"], baseline["losses"]):  # losses are smooth: nothing was computed differently
            found = replace(found, low=0.0, high=0.0, mde=0.0, verdict="equivalent")
        value, low, high = (x / 100 for x in (found.estimate, found.low, found.high))
        comparison = Comparison(
            metric=found.metric,
            baseline=ARMS["high"],
            candidate=label,
            relative_change=Interval(value=value, low=min(low, value), high=max(high, value)),
            margin=self.config.margin,
            minimum_detectable=found.mde / 100,
            outcome=found.verdict,
            pairs=found.pairs,
            clusters=found.units,
            method=found.method,
            low_precision_flops_share=share,
        )
        records.save(comparison, self._record(f"comparison-{name}"))

    def _report(self) -> None:
        write_html(Results.load(self.out / "records"), self.out / "report.html")

    # Parts

    @property
    def _data(self) -> RankingData:
        if self._loaded is None:
            self._loaded = self._load_data(self.config.data)
        return self._loaded

    def _build(self) -> nn.Module:
        torch.manual_seed(self.config.seed)
        return build_ranker(self._data.schema, self.config.family, self.config.size).to(self.config.device)

    @property
    def _on_gpu(self) -> bool:
        return self.config.device.startswith("cuda")

    def _fit(self, name: str, model: nn.Module, steps: int, fork: Snapshot | None = None) -> Trainer:
        """Train in out/<name>, starting from `fork` if given. Continue at the last checkpoint if there is one."""
        config = TrainConfig(
            steps=steps,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            device=self.config.device,
            learning_rate=self.config.learning_rate,
            schedule="constant" if fork is None else "linear",  # to zero, so that the jitter of a run averages out
            log_every=10,
            checkpoint_every=100,
            keep=1,
        )
        folder = self.out / name
        watchers = [JsonlLog(folder / "log.jsonl"), StepTalk(name, self._talk)]
        trainer = Trainer(model, self._data, config, callbacks=watchers, out=folder)
        if fork is not None:
            trainer.optimizers.load_state_tensors(fork.tensors["optimizer"])
            trainer.stream.load_state_dict(fork.state["stream"])
        trainer.fit(resume=True)
        return trainer

    def _example(self) -> Any:
        """Return one training batch."""
        batches = self._data.train.batches(self.config.batch_size, shuffle=True, seed=self.config.seed)
        return next(batches).to(self.config.device)

    def _convert(self, model: nn.Module, arm: str) -> Conversion:
        """Convert by tune's plan; the naive arm uses FP8 for every linear instead."""
        example = self._example()
        if arm == "naive":
            return convert(model, recipe="tensorwise", example=example)
        return convert(model, records.load(self._record("tuning"), Tuning).plan, example=example)

    @torch.no_grad()
    def _score(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return log loss and household of every test example, in order, and the metrics of the whole split."""
        model.eval()
        losses, groups = [], []
        metrics: dict[str, LogLoss | NormalizedEntropy | AUC] = {
            "log_loss": LogLoss(),
            "ne": NormalizedEntropy(),
            "auc": AUC(),
        }
        for batch in (b.to(self.config.device) for b in self._data.test.batches(4096, shuffle=False, seed=0)):
            logits, labels = model(batch).reshape(-1), batch.labels.reshape(-1)
            losses.append(log_losses(logits, labels))
            groups.append(batch.group)
            for metric in metrics.values():
                metric.update(logits, labels)
        scores = {"losses": torch.cat(losses).cpu(), "group": torch.cat(groups).cpu()}
        return scores, {name: metric.compute() for name, metric in metrics.items()}

    def _checkpoint(self, name: str) -> Snapshot:
        return read_checkpoint(find_checkpoints(self.out / name / "checkpoints")[-1])

    def _environment(self) -> Environment:
        device = name_device(torch.device(self.config.device))
        return capture_environment(command=self._command, device=device, threads=torch.get_num_threads())

    # Progress

    def _record(self, name: str) -> Path:
        return self.out / "records" / f"{name}.json"

    def _resume(self) -> None:
        """Take over finished stations if the settings are the same; otherwise move them away and keep the reason."""
        path = self.out / "progress.json"
        if not path.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise ValueError(f"{self.out} holds other files; choose an empty folder with --out")
            self._save_progress()
            return
        stored = records.load(path, Progress)
        changes = _list_changes(stored.settings, asdict(self.config))
        if not changes:
            self._done = [name for name in self.stations if name in stored.done]
            return
        place = next(path for n in itertools.count(1) if not (path := self.out / f"earlier-{n}").exists())
        place.mkdir()
        for name in ("records", "train", "tuning", *ARMS, "report.html", "progress.json"):
            if (self.out / name).exists():
                (self.out / name).rename(place / name)
        self.restarted = f"settings changed ({changes}); the earlier results are now in {place}"
        self._save_progress()

    def _save_progress(self) -> None:
        records.save(
            Progress(job="demo", settings=asdict(self.config), done=list(self._done)), self.out / "progress.json"
        )


def _share(done: Conversion | None) -> float:
    """Return the share of the model's GEMM FLOPs in low precision."""
    return 0.0 if done is None or done.low_precision_share is None else done.low_precision_share


_PRECISIONS = {"high": "fp32", "control": "fp32, weights nudged by one bf16 rounding"}


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    """Change every weight once by about one bf16 rounding, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=generator).to(parameter.device))


def _list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    names = [n for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]
    return ", ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in names)


def _read_curve(path: Path, *, offset: int) -> list[Point]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Point(step=offset + line["step"], loss=line["loss"], examples_per_second=line["examples_per_s"])
        for line in lines
        if line.get("loss") is not None
    ]


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    records.write_atomically(path, save(tensors))


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
