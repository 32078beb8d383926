"""The stations of the demo, each of which leaves records or a checkpoint behind."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka import records
from loka.data import RankingData, Split, load
from loka.demo.callbacks import ProbeCallback, StepTalk, Talk
from loka.demo.config import DemoConfig, DemoResult
from loka.demo.elsewhere import LEAST_SPEEDUP, look_elsewhere
from loka.demo.suggested import apply_suggested, protected_sites
from loka.dispatch import Policy, make_plan, uniform_plan
from loka.kernels.registry import BACKENDS
from loka.metrics import AUC, LogLoss, NormalizedEntropy, compare_paired, log_losses
from loka.models import build_ranker
from loka.placing import convert
from loka.probe import Probe, add_sensitivity, measure_sensitivity
from loka.records import Comparison, Environment, Interval, Plan, Point, ProbeReport, Progress, Run, capture_environment
from loka.report import Results, write_html
from loka.training import Callback, JsonlLog, TrainConfig, Trainer, find_checkpoints, ranking_loss
from loka.training.checkpoint import Snapshot, read_checkpoint

ARMS = {"high": "high precision", "control": "control", "planned": "planned FP8", "naive": "naive FP8"}
COMPARED = ("planned", "naive", "control")
SWAPPED = ("planned", "naive")
NUDGE = 2.0**-9  # relative size of one bf16 rounding: far below FP8's 2^-4, far above float32's 2^-24


def _say_nothing(station: str, done: int, total: int | None) -> None:
    """The default Talk."""


class Demo:
    """One demo below one folder. `run` goes through the stations that are not finished."""

    def __init__(
        self,
        out: str | Path = "runs/demo",
        config: DemoConfig | None = None,
        *,
        talk: Talk = _say_nothing,
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
        """Name -> job, in order."""
        arms = {arm: (lambda arm=arm: self._train_arm(arm)) for arm in ARMS}
        return {
            "train": self._train,
            "probe": self._probe,
            "mods": self._mods,
            "plan": self._plan,
            **arms,
            "swap": self._swap,
            "compare": self._compare,
            "report": self._report,
        }

    def run(self) -> DemoResult:
        """Run or continue the job."""
        self._resume()
        resumed = tuple(self._done)
        for name, job in self.stations.items():
            if name not in self._done:
                self._talk(name, 0, None)
                job()
                self._done.append(name)
                self._save_progress()
        plan = records.load(self._record("plan"), Plan)
        converted = sum(any(c.quantized for c in site.choices) for site in plan.sites)
        names = [*COMPARED, *(f"swap-{arm}" for arm in SWAPPED)]
        comparisons = {name: records.load(self._record(f"comparison-{name}"), Comparison) for name in names}
        there = self._record("plan-elsewhere")
        return DemoResult(
            self.out / "report.html",
            plan,
            comparisons,
            converted,
            len(plan.sites),
            resumed,
            self.restarted,
            records.load(there, Plan) if there.exists() else None,
        )

    # Stations

    def _train(self) -> None:
        model = self._build()
        probe = Probe(model, every=self.config.probe_every, rows=self.config.rows, seed=self.config.seed)
        self._fit("train", model, self.config.steps, [ProbeCallback(probe)])
        probe.detach()

    def _probe(self) -> None:
        model, snapshot = self._build(), self._checkpoint("train")
        model.load_state_dict(snapshot.tensors["model"])
        probe = Probe(model, every=self.config.probe_every, rows=self.config.rows, seed=self.config.seed)
        prefix = "callback/probe/"
        seen = {k.removeprefix(prefix): v for k, v in snapshot.tensors["extra"].items() if k.startswith(prefix)}
        probe.load_state_dict(seen)
        batch = self._example()
        probe.count_flops(lambda: ranking_loss(model, batch)[0].backward())  # type: ignore[no-untyped-call]
        report = probe.evaluate(
            samples=self.config.samples,
            max_error=self.config.max_error,
            max_gradient_error=self.config.max_gradient_error,
            model_name=f"{self.config.family} {self.config.size}",
            command=self._command,
            data_name=self._data.name,
            backends=BACKENDS["scaled_mm"] if self._on_gpu else ("reference",),
            progress=lambda _, done, total: self._talk("probe", done, total),
        )
        records.save(probe.drift(), self._record("drift"))
        probe.detach()
        count = min(self.config.sensitivity_examples, len(self._data.valid))
        found = measure_sensitivity(
            model,
            probe.sites,
            lambda m: self._lose(m, self._data.valid, count),
            seed=self.config.seed,
            progress=lambda _, done, total: self._talk("sensitivity", done, total),
        )
        described = (
            f"log loss of the first {count:,} validation examples, the site alone in tensorwise FP8, not trained on"
        )
        add_sensitivity(report, found, described=described).to_json(self._record("probe"))

    def _mods(self) -> None:
        model, report = self._build(), records.load(self._record("probe"), ProbeReport)
        summary = apply_suggested(model, report, self._example(), name=report.model)
        records.save(summary, self._record("mods"))

    def _plan(self) -> None:
        """The plan that runs here, the naive one, and the one for a machine elsewhere."""
        report = records.load(self._record("probe"), ProbeReport)
        model = self._build()
        apply_suggested(model, report, self._example(), name=report.model)
        overrides = protected_sites(model, report)
        policy = Policy(
            max_error=report.max_mere,
            max_gradient_error=report.max_gradient_error,
            min_speedup=LEAST_SPEEDUP if self._on_gpu else None,
            overrides=overrides,
        )
        records.save(make_plan(report, policy), self._record("plan"))
        records.save(uniform_plan(report, "tensorwise"), self._record("plan-naive"))
        if not self._on_gpu:
            there = look_elsewhere(report, self.config.target, self.config.row_factor)
            records.save(there.plan(overrides), self._record("plan-elsewhere"))
            records.save(there.speeds(), self._record("speeds-elsewhere"))
            records.save(there.rows(), self._record("rows-elsewhere"))

    def _train_arm(self, arm: str) -> None:
        model, snapshot = self._build(), self._checkpoint("train")
        model.load_state_dict(snapshot.tensors["model"])
        plan = None
        if arm == "control":
            _nudge(model, self.config.seed)
        elif arm != "high":
            plan = self._plan_of(arm)
            self._convert(model, arm, plan)
        trainer = self._fit(arm, model, self.config.more_steps, [], fork=snapshot)
        self._talk(f"{arm}: test", 0, None)
        scores, metrics = self._score(model)
        _save_tensors(self.out / arm / "test.safetensors", scores)
        precision = (
            _PRECISIONS.get(arm)
            or f"{plan.recipe if plan else ''} FP8{'' if self._on_gpu else ' (emulated)'}, fp32 elsewhere"
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
            low_precision_flops_share=0.0 if plan is None else plan.low_precision_share,
            environment=self._environment(),
        )
        records.save(run, self._record(f"run-{arm}"))

    def _swap(self) -> None:
        """The high-precision run's final weights in FP8, without training on: what a model served in FP8 loses."""
        baseline = _load_tensors(self.out / "high" / "test.safetensors")
        for number, arm in enumerate(SWAPPED):
            self._talk("swap", number, len(SWAPPED))
            model, plan = self._build(), self._plan_of(arm)
            model.load_state_dict(self._checkpoint("high").tensors["model"])
            self._convert(model, arm, plan)
            scores, _ = self._score(model)
            self._write_comparison(f"swap-{arm}", scores, baseline, f"{ARMS[arm]}, swapped in", plan)

    def _compare(self) -> None:
        scores = {arm: _load_tensors(self.out / arm / "test.safetensors") for arm in ARMS}
        for arm in COMPARED:
            plan = None if arm == "control" else self._plan_of(arm)
            self._write_comparison(arm, scores[arm], scores["high"], ARMS[arm], plan)

    def _write_comparison(
        self,
        name: str,
        candidate: dict[str, Tensor],
        baseline: dict[str, Tensor],
        label: str,
        plan: Plan | None,
    ) -> None:
        """A run against the high-precision one."""
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
            low_precision_flops_share=0.0 if plan is None else plan.low_precision_share,
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

    def _fit(
        self, name: str, model: nn.Module, steps: int, callbacks: list[Callback], fork: Snapshot | None = None
    ) -> Trainer:
        """Train below out/<name>, from `fork` where given; continues at the last checkpoint where there is one."""
        config = TrainConfig(
            steps=steps,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            device=self.config.device,
            learning_rate=self.config.learning_rate,
            schedule="constant" if fork is None else "linear",  # to zero: what a run still jitters by averages out
            log_every=10,
            checkpoint_every=100,
            keep=1,
        )
        folder = self.out / name
        watchers = [JsonlLog(folder / "log.jsonl"), StepTalk(name, self._talk)]
        trainer = Trainer(model, self._data, config, callbacks=[*callbacks, *watchers], out=folder)
        if fork is not None:
            trainer.optimizers.load_state_tensors(fork.tensors["optimizer"])
            trainer.stream.load_state_dict(fork.state["stream"])
        trainer.fit(resume=True)
        return trainer

    def _example(self) -> Any:
        """One training batch."""
        batches = self._data.train.batches(self.config.batch_size, shuffle=True, seed=self.config.seed)
        return next(batches).to(self.config.device)

    def _convert(self, model: nn.Module, arm: str, plan: Plan) -> None:
        """The planned arm carries the mods; the naive one is what turning FP8 on everywhere does."""
        if arm == "planned":
            report = records.load(self._record("probe"), ProbeReport)
            apply_suggested(model, report, self._example(), name=report.model)
        convert(model, plan)

    @torch.no_grad()
    def _lose(self, model: nn.Module, split: Split, count: int) -> tuple[Tensor, Tensor]:
        """Log loss and household of the first examples of a split."""
        losses, groups = [], []
        for batch in (b.to(self.config.device) for b in split.batches(4096, shuffle=False, seed=0)):
            losses.append(log_losses(model(batch).reshape(-1), batch.labels.reshape(-1)))
            groups.append(batch.group)
            if sum(map(len, losses)) >= count:
                break
        return torch.cat(losses)[:count], torch.cat(groups)[:count]

    @torch.no_grad()
    def _score(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Log loss and household of every test example, in order; and the metrics of the whole split."""
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

    def _plan_of(self, arm: str) -> Plan:
        return records.load(self._record({"planned": "plan", "naive": "plan-naive"}[arm]), Plan)

    def _checkpoint(self, name: str) -> Snapshot:
        return read_checkpoint(find_checkpoints(self.out / name / "checkpoints")[-1])

    def _environment(self) -> Environment:
        device = torch.cuda.get_device_name(self.config.device) if self._on_gpu else "cpu"
        return capture_environment(command=self._command, device=device, threads=torch.get_num_threads())

    # Progress

    def _record(self, name: str) -> Path:
        return self.out / "records" / f"{name}.json"

    def _resume(self) -> None:
        """Take over finished stations of the same settings; anything else is removed, and the reason kept."""
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
        self.restarted = f"settings changed ({changes}); earlier results under {self.out} are replaced"
        for name in ("records", "train", *ARMS):
            shutil.rmtree(self.out / name, ignore_errors=True)
        (self.out / "report.html").unlink(missing_ok=True)
        self._save_progress()

    def _save_progress(self) -> None:
        records.save(
            Progress(job="demo", settings=asdict(self.config), done=list(self._done)), self.out / "progress.json"
        )


_PRECISIONS = {"high": "fp32", "control": "fp32, weights nudged by one bf16 rounding"}


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    """Change every weight by about one bf16 rounding, once; the same on every device."""
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
