"""`loka probe`: train a model for a while with a probe attached, then report which GEMMs are safe and fast in FP8.

    loka probe --model wukong:tiny --steps 60 --samples 10 --out probe.json
    loka probe --model hstu:small --data ml-1m --steps 300 --metric recall@10 --out hstu.json
    loka probe --model mine.model:build --data mine.data:batches --loss mine.loss:mean_squared --steps 50 --samples 10 --out mine.json
    loka probe --model wukong:tiny --steps 60 --samples 10 --out probe.json --resume    after Ctrl-C, or to reevaluate

stdout carries the table (with `--json` the record). `--out` is the report. After training or at Ctrl-C the state of the
model, its optimizer and the probe is written next to it, to `<out>.state.safetensors`; `--resume` continues from there.
Exit 1 if the loss became NaN or infinite, or no site could be measured; 2 if the request is invalid.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loka.cli.subject import Subject
    from loka.probe import Probe, Report
    from loka.training import Optimizers

STATE = ".state.safetensors"
TELL_EVERY = 2.0  # seconds between progress lines


@dataclass(frozen=True)
class Job:
    """The settings that determine what the probe learns. `--resume` rejects the state of another job."""

    model: str
    data: str | None
    batch_size: int
    seed: int
    learning_rate: float
    every: int
    rows: int
    kinds: str


def probe(
    model: Annotated[str, typer.Option(help="wukong:small, dlrm, hstu:small, ... or pkg.module:factory.")] = "wukong",
    data: Annotated[
        str | None, typer.Option(help="Data set, or pkg.module:batches; default: complete-journey.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="pkg.module:fn(output, targets); default: BCE of logits.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps to watch.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Examples (sequence models: users) per batch.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    every: Annotated[int, typer.Option(help="Observe every site once in this many steps.")] = 20,
    rows: Annotated[int, typer.Option(help="Real rows kept per site.")] = 512,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Kind of sites: linear, grouped, mixed, batched or lookup; default: linear."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Draws per distribution and GEMM.")] = 100,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="tensorwise, rowwise, blockwise (default: these), rowwise_with_gw_hp, mxfp8, nvfp4, int8."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backend of scaled_mm; default: reference on a CPU, torch and triton on a GPU."),
    ] = None,
    sensitivity: Annotated[
        int, typer.Option(help="Held-out examples to measure the end metric on; 0: do not measure it.")
    ] = 8192,
    metric: Annotated[str | None, typer.Option(help="End metric, e.g. recall@10 for sequence models.")] = None,
    max_error: Annotated[
        float, typer.Option(help="Limit of the forward error (MERE, the mean element-wise relative error).")
    ] = 0.2,
    max_gradient_error: Annotated[float, typer.Option(help="Limit of the relative L2 error of gradients.")] = 0.1,
    min_speedup: Annotated[float, typer.Option(help="Smallest speedup over bf16 that counts as fast.")] = 1.05,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and draws.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model option, e.g. norm=block.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="Data set option, e.g. rows=100000.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report (JSON) here, and the state for --resume next to it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the report as an HTML page.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the state next to --out.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train a model with a probe attached, and report which GEMMs are safe and fast in FP8, and why."""
    import torch

    from loka import records
    from loka.cli.subject import load_subject
    from loka.cli.train import parse_options
    from loka.probe import Probe

    check_request(steps, sensitivity, out, html, resume)
    limits = {"--max-error": max_error, "--max-gradient-error": max_gradient_error, "--min-speedup": min_speedup}
    check_evaluation({"--samples": samples, "--threads": threads, **limits}, backend or [])
    if threads is not None:
        torch.set_num_threads(threads)
    options, data_options = parse_options(set_), parse_options(data_option)
    subject = load_subject(
        model, data, batch_size=batch_size, seed=seed, loss=loss, device=device, root=data_root, source=source,
        model_options=options, data_options=data_options,
    )  # fmt: skip
    if metric is not None and metric not in subject.metrics:
        raise ValueError(f"{model} has no metric {metric!r}; it has {', '.join(subject.metrics)}")
    kinds = kind or ["linear"]
    job = Job(model, subject.data, batch_size, seed, learning_rate, every, rows, ",".join(kinds))
    watcher = Probe(subject.model, every=every, rows=rows, seed=seed, kinds=kinds, recipes=recipe or ())  # type: ignore[arg-type]
    state = None if out is None else out.with_name(out.name + STATE)
    learn(subject, watcher, job, steps, state, resume=resume)
    # Chains are found by running the model, which may be a user's and may print.
    with keeping(state), redirect_stdout(sys.stderr):
        report = watcher.evaluate(
            recipe or None,
            samples=samples,
            backends=backend or None,
            max_error=max_error,
            max_gradient_error=max_gradient_error,
            min_speedup=min_speedup,
            model_name=model,
            data_name=subject.data,
            progress=Meter("evaluate"),
        )
        if sensitivity:
            report = add_metric(report, subject, sensitivity, metric or subject.metrics[0], seed)
    if out is not None:
        report.save(out)
    if html is not None:
        report.to_html(html)
    typer.echo(records.to_json(report.record).decode() if json_ else report.table())
    for line in report.summary():
        typer.echo(line, err=True)
    if all(v.safety == "not measured" for site in report.record.sites for v in site.verdicts):
        raise typer.Exit(1)


def check_request(steps: int, sensitivity: int, out: Path | None, html: Path | None, resume: bool) -> None:
    """Reject contradictory options before anything is loaded."""
    if steps < 1 or sensitivity < 0:
        raise ValueError(f"--steps {steps} --sensitivity {sensitivity}: expected at least 1, and not negative")
    if resume and out is None:
        raise ValueError("--resume continues from the state next to the report: give --out")
    check_file("--out", out)
    check_file("--html", html)
    if html is not None:
        from loka.report.render import require_charts

        require_charts()


def check_evaluation(amounts: dict[str, float | None], backends: list[str]) -> None:
    """Reject what otherwise only the evaluation would, after the training."""
    from loka.kernels import registry

    for option, amount in amounts.items():
        if amount is not None and not amount > 0:
            raise ValueError(f"{option} {amount:g}: expected a number above 0")
    for name in backends:
        registry.backend("scaled_mm", name)


@contextmanager
def keeping(state: Path | None) -> Iterator[None]:
    """On Ctrl-C after training, say that the probe's state was saved."""
    try:
        yield
    except KeyboardInterrupt:
        if state is not None:
            typer.echo("the probe's state is saved; the same command with --resume evaluates it", err=True)
        raise


class Meter:
    """Print progress and the remaining time to stderr, at most one line every `TELL_EVERY` seconds.

    Where less is done than before, or of another total, another part of the work has begun: it is timed by itself.
    """

    def __init__(self, what: str) -> None:
        self._what, self._done, self._total = what, 0, 0
        self._started, self._told = 0.0, -math.inf

    def __call__(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` are finished and `name` is next."""
        now = time.monotonic()
        if total != self._total or done < self._done:
            self._total, self._started, self._told = total, now, -math.inf
        self._done = done
        if now - self._told < TELL_EVERY and done < total:
            return
        self._told = now
        left = f", {spell_seconds((now - self._started) / done * (total - done))} left" if done else ""
        typer.echo(f"{self._what}: {done} of {total}{left}{f', {name}' if name else ''}", err=True)


def spell_seconds(seconds: float) -> str:
    """Format a duration as seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def learn(subject: Subject, watcher: Probe, job: Job, steps: int, state: Path | None, *, resume: bool) -> None:
    """Train with the probe attached. The state is written at the end, and also after Ctrl-C or an error."""
    from loka.training import Optimizers, TrainConfig

    config = TrainConfig(steps=steps, batch_size=job.batch_size, learning_rate=job.learning_rate)
    optimizers = Optimizers(subject.model, config)
    if resume:
        assert state is not None  # checked by check_request
        load_state(state, subject.model, optimizers, watcher, job)
        typer.echo(f"continuing after {watcher.steps} steps", err=True)
    meter, subject_model = Meter("train"), subject.model
    subject_model.train()
    try:
        if watcher.steps < steps:
            first = next(subject.stream("train"))
            watcher.count_flops(lambda: subject.loss(first).backward())  # type: ignore[no-untyped-call]
            for batch in islice(subject.stream(skip=watcher.steps), steps - watcher.steps):
                step(subject, optimizers, batch, watcher)
                meter("", watcher.steps, steps)
    finally:
        watcher.detach()
        if state is not None:
            save_state(state, subject_model, optimizers, watcher, job)
            if sys.exc_info()[0] is not None:
                typer.echo(
                    f"the state after {watcher.steps} steps is saved; the same command with --resume continues",
                    err=True,
                )


def step(subject: Subject, optimizers: Optimizers, batch: Any, watcher: Probe) -> None:
    """Run one training step; exit 1 if the loss is not finite."""
    optimizers.zero_grad()
    loss = subject.loss(batch)
    value = float(loss.detach())
    if not math.isfinite(value):
        typer.echo(f"error: the loss is {value} at step {watcher.steps}; a lower --learning-rate may help", err=True)
        raise typer.Exit(1)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizers.step()
    watcher.step(value)


def save_state(path: Path, model: nn.Module, optimizers: Optimizers, watcher: Probe, job: Job) -> None:
    """Write the state of model, optimizer and probe to one safetensors file."""
    from safetensors.torch import save

    from loka.records import write_atomically

    parts = {"model": model.state_dict(), "optimizer": optimizers.state_tensors(), "probe": watcher.state_dict()}
    tensors = {
        f"{part}/{name}": value.detach().cpu().clone().contiguous()
        for part, values in parts.items()
        for name, value in values.items()
    }
    write_atomically(path, save(tensors, metadata={"job": json.dumps(asdict(job))}))


def load_state(path: Path, model: nn.Module, optimizers: Optimizers, watcher: Probe, job: Job) -> None:
    """Restore a state; the state of another job is an error."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"--resume: there is no state {path}; run without --resume")
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "probe": {}}
    try:
        with safe_open(path, framework="pt") as file:
            stored = json.loads((file.metadata() or {}).get("job", "{}"))
            for key in file.keys():  # noqa: SIM118  not a dict
                part, _, name = key.partition("/")
                parts[part][name] = file.get_tensor(key)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a state of `loka probe` ({error}); run without --resume") from error
    wanted = asdict(job)
    changes = [f"{name}: {stored.get(name)} -> {value}" for name, value in wanted.items() if stored.get(name) != value]
    if changes:
        raise ValueError(f"{path} is the state of another job ({', '.join(changes)}); choose another --out")
    model.load_state_dict(parts["model"])
    optimizers.load_state_tensors(parts["optimizer"])
    watcher.load_state_dict(parts["probe"])


def make_score(subject: Subject, metric: str, examples: int) -> tuple[Callable[[nn.Module], Any], int]:
    """Return a function that scores a model on fixed held-out examples, and the number of examples."""
    import torch

    held, count = [], 0
    for batch in subject.batches("valid"):
        held.append(batch)
        with torch.no_grad():
            count += int(subject.values(batch, metric).numel())
        if count >= examples:
            break
    if not held:
        raise ValueError(f"{subject.data}: no validation batch to measure the metric on")

    def score(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        values = [subject.values(batch, metric) for batch in held]
        groups = [subject.group(batch) for batch in held]
        known = [g for g in groups if g is not None]
        return torch.cat(values), torch.cat(known) if len(known) == len(values) else None

    return score, count


def add_metric(report: Report, subject: Subject, examples: int, metric: str, seed: int) -> Report:
    """Add the sensitivity of the metric to every linear alone, and to all safe linears together."""
    from loka.probe.sensitivity import add_sensitivity, measure_sensitivity, measure_together, recipes_of

    score, count = make_score(subject, metric, examples)
    best, safe = recipes_of(report, subject.model)
    alone = measure_sensitivity(subject.model, best, score, seed=seed, progress=Meter("sensitivity"))
    together = measure_together(subject.model, safe, score, seed=seed) if safe else None
    where = "held-out" if subject.held_out else "training (the data has no split)"
    return add_sensitivity(
        report,
        alone,
        described=f"{metric} of {count:,} {where} examples, forward in FP8",
        recipes=best,
        together=together,
        together_sites=list(safe),
    )
