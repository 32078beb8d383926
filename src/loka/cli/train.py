"""`loka train`: train a ranking model, or a sequence model (loka.cli.train_sequence), on a data set.

    loka train --model wukong --config tiny --data complete-journey --steps 20 --precision bf16 --out runs/x
    torchrun --nproc-per-node 8 -m loka train --distributed --rows int8:row --collectives e4m3:1x128:pow2 --out runs/x
    torchrun --nproc-per-node 8 -m loka train --distributed --sharding row --dense ddp --plan plan.json --out runs/y
    loka train --from runs/x/checkpoints/step-00000020 --mods no_bias,block_norm,hard_swish --steps 10

This file turns options into the parts of loka.training. With `--out` the run writes

    checkpoints/   the last and the best        model.json    the model's configuration, to build it again
    log.jsonl      the training curve           run.json      the Run record, test metrics included
    mods.json      with --mods: what changed    result.json   what was compiled and why, resumed from, best step
    bundle.json    OneRec: the recommender, with model.safetensors and index.safetensors, for loka quantize, generate,
                   ab and serve

Test metrics are those of the best weights if the run evaluates, otherwise of the last. stdout carries the result (with
`--json` the Run record). Exit 1 if the loss became NaN or infinite; 2 if the request is invalid.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import claim_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from loka.data import RankingData
    from loka.data.progress import Progress
    from loka.models import Ranker
    from loka.records import Conversion, ModSummary, Run
    from loka.training import Callback, Curve, TrainConfig, Trainer, TrainResult
    from loka.training.stream import TrainData


@dataclass(frozen=True)
class Recipe:
    """The model and its data: enough to build them again."""

    model: str
    config: str
    model_options: dict[str, Any]
    data: str
    data_options: dict[str, Any]
    mods: str | None = None


@dataclass(frozen=True)
class Order:
    """A requested run: what is built, how it is trained, from which weights, and where it is written."""

    recipe: Recipe
    settings: TrainConfig
    threads: int | None = None
    root: Path | None = None
    source: Path | None = None
    weights: Path | None = None  # checkpoint to start from
    out: Path | None = None
    plan: Path | None = None
    fp8: str | None = None  # one recipe for every linear, instead of a plan
    resume: bool = False
    fallback: bool = False


def train(
    model: Annotated[str, typer.Option(help="Model family.")] = "wukong",
    config: Annotated[str, typer.Option(help="Named size of the family.")] = "tiny",
    data: Annotated[str, typer.Option(help="Data set, see `loka data`.")] = "complete-journey",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 1024,
    accumulate: Annotated[int, typer.Option(help="Batches per optimizer step.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile; default: depends on the machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads; fix it for bit-exact resumes.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW, for dense parameters.")] = 1e-3,
    embedding_learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate of rowwise Adagrad, for embedding tables.")
    ] = 2e-2,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of dense matrices.")] = 0.0,
    clip_norm: Annotated[float | None, typer.Option(help="Clip the norm of the dense gradient to this.")] = None,
    schedule: Annotated[str, typer.Option(help="constant, linear or cosine.")] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: never.")] = 200,
    monitor: Annotated[
        str | None,
        typer.Option(help="Metric that decides which weights are best; default: ne, or ndcg@10 for sequence models."),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many evaluations without improvement; default: never.")
    ] = None,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 50,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: best and last only.")] = 0,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep, besides the best.")] = 2,
    max_bad_batches: Annotated[
        int, typer.Option(help="Number of batches with a non-finite loss to skip before giving up.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; without it nothing is written.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or start it if there is none.")
    ] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="With --resume: use an older checkpoint if the last is damaged.")
    ] = False,
    from_: Annotated[Path | None, typer.Option("--from", help="Start from the weights of this checkpoint.")] = None,
    mods: Annotated[
        str | None, typer.Option(help="Mods to apply first, comma-separated; see `loka mods list`.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model option, e.g. norm=block.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="Data set option, e.g. rows=100000.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    rows: Annotated[
        str | None, typer.Option(help="Format of embedding rows during training, e.g. int8:row; default: float32.")
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed", help="Run as one of torchrun's processes; --batch-size is the total over all of them."
        ),
    ] = False,
    collectives: Annotated[
        str | None,
        typer.Option(
            help="With --distributed: codec of weights and gradients, e.g. e4m3:1x128:pow2; under FSDP2 also WEIGHTS,GRADIENTS."
        ),
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="With --distributed: shard the tables with TorchRec by table, row or column; default: replicate them."
        ),
    ] = None,
    dense: Annotated[
        str | None, typer.Option(help="With --distributed: fsdp shards the dense part (default), ddp replicates it.")
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(
            help="With --sharding: codecs of embeddings and their gradients, e.g. e4m3:1x32:e8m0,e5m2:1x32:e8m0."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Convert the model by this plan (loka tune, loka plan) before training.")
    ] = None,
    fp8: Annotated[
        str | None, typer.Option("--recipe", help="Train every linear with one FP8 recipe: tensorwise, rowwise, ...")
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="Switch linears that go wrong in FP8 back to high precision.")
    ] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard logs to --out.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the Run record as JSON.")] = False,
) -> None:
    """Train a ranking or sequence model and test it."""
    from loka.cli import train_sequence
    from loka.cli.recovery import rewrite
    from loka.cli.train_ranks import check_tables, read_distribution, run_distributed
    from loka.nn.tables import quantize_tables
    from loka.training import NonFiniteLossError, TrainConfig, Trainer

    claim_folder("--out", out)
    try:
        is_sequence = model in train_sequence.FAMILIES
        if is_sequence:
            train_sequence.check_request(model, compile_, mods, out)
        recipe = Recipe(model, config, parse_options(set_), data, parse_options(data_option), mods)
        settings = TrainConfig(
            steps=steps,
            batch_size=batch_size,
            accumulate=accumulate,
            seed=seed,
            device=device,
            precision=precision,  # type: ignore[arg-type]
            compile="off" if is_sequence else "auto" if compile_ is None else "on" if compile_ else "off",
            learning_rate=learning_rate,
            embedding_learning_rate=embedding_learning_rate,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            schedule=schedule,  # type: ignore[arg-type]
            warmup_steps=warmup_steps,
            evaluate_every=evaluate_every,
            monitor=monitor or (train_sequence.MONITOR if is_sequence else "ne"),
            patience=patience,
            log_every=log_every,
            checkpoint_every=checkpoint_every,
            keep=keep,
            max_bad_batches=max_bad_batches,
        )
        order = Order(recipe, settings, threads, data_root, source, from_, out, plan, fp8, resume, fallback)
        check_request(order, tensorboard, distributed=distributed)
        how = read_distribution(
            distributed, rows=rows, collectives=collectives, sharding=sharding, dense=dense, embeddings=embeddings
        )
        if distributed or rows is not None:
            check_tables(model, how, is_sequence=is_sequence, mods=mods, distributed=distributed)
        if (plan or fp8) and is_sequence:
            raise ValueError(
                "--plan and --recipe convert ranking models; sequence models take loka.convert in a script"
            )
        if how is not None:
            run_distributed(order, how, as_json=json_)
            return
        changed = converted = None
        if is_sequence:
            job = train_sequence.prepare_sequence(order)
            trainer, curve = make_trainer(job.network, job.task, settings, out, tensorboard, **job.hooks())
            test = job.test
        else:
            dataset, network = prepare(replace(order, weights=None) if mods else order)
            changed = rewrite(network, mods, dataset, from_, settings) if mods else None
            if rows is not None:
                quantize_tables(network, rows=rows)
            converted = convert_for_training(network, plan, fp8, dataset, out)
            guarded = guard and converted is not None and bool(converted.converted)
            trainer, curve = make_trainer(network, dataset, settings, out, tensorboard, guard=guarded)
            test = partial(Trainer.evaluate, split=dataset.test)
        result = trainer.fit(resume=resume, fallback=fallback)
        run = finish(trainer, result, recipe, test, curve, out, converted)
        if is_sequence and out is not None:
            from loka.inference import save_bundle

            if (bundle := train_sequence.make_bundle(job, trainer, recipe, loss=result.loss)) is not None:
                save_bundle(bundle, out)
        summary = changed.finish(run.metrics, run.steps, out, resumed=resume) if changed else None
    except KeyboardInterrupt:
        tell_kept(out)
        raise
    except NonFiniteLossError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    tell(result, run, summary, as_json=json_)


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Parse `name=value` pairs. A value that is valid JSON is decoded, any other is text."""
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"expected name=value, got {pair!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        options[name] = tuple(value) if isinstance(value, list) else value
    return options


def check_request(order: Order, tensorboard: bool, *, distributed: bool) -> None:
    """Reject contradictory options before anything is loaded."""
    import os

    resume = order.resume
    if order.threads is not None and order.threads < 1:
        raise ValueError(f"--threads {order.threads}: expected at least 1")
    if resume and order.weights is not None:
        raise ValueError("--resume continues a run and --from starts a new one: choose one")
    if order.fallback and not resume:
        raise ValueError("--fallback says what to do if a run cannot be resumed: it needs --resume")
    if order.out is None and (resume or tensorboard):
        raise ValueError(f"{'--resume' if resume else '--tensorboard'} needs the folder of the run: give --out")
    if distributed and tensorboard:
        raise ValueError("--tensorboard is not supported with --distributed; log.jsonl has the curve")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed:
        raise ValueError(
            "WORLD_SIZE is above 1, but loka train without --distributed is a single process: each would train its own model; "
            "give --distributed, or pass a DistributedDataParallel model to loka.training.Trainer"
        )


def prepare(order: Order) -> tuple[RankingData, Ranker]:
    """Load the data and build the model, seeded."""
    import torch

    from loka.data import load
    from loka.models import build_ranker
    from loka.training import load_weights, seed_everything

    recipe = order.recipe
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    dataset = load(recipe.data, root=order.root, source=order.source, progress=tell_stages(), **recipe.data_options)
    seed_everything(order.settings.seed)
    network = build_ranker(dataset.schema, recipe.model, recipe.config, sparse=True, **recipe.model_options)
    if order.weights is not None:
        load_weights(network, order.weights)
    return dataset, network


def tell_stages() -> Progress:
    """Return a `progress` callback for `load` that prints each stage of a first build once, to stderr."""
    last = ""

    def tell_stage(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        if stage != last:
            typer.echo(f"data: {stage}", err=True)
            last = stage

    return tell_stage


def convert_for_training(
    network: nn.Module, plan: Path | None, recipe: str | None, dataset: RankingData, out: Path | None
) -> Conversion | None:
    """Convert by a plan or a recipe, print a summary and write the record; return None if neither is given."""
    if plan is None and recipe is None:
        return None
    from loka import records
    from loka.placing import convert

    loaded = None if plan is None else records.Plan.load(plan)
    done = convert(network, loaded, recipe=recipe, example=next(dataset.train.batches(8, shuffle=False, seed=0)))
    typer.echo(str(done), err=True)
    if out is not None:
        records.save(done, out / "conversion.json")
    return done


def make_trainer(
    network: nn.Module,
    dataset: TrainData,
    settings: TrainConfig,
    out: Path | None,
    tensorboard: bool,
    guard: bool = False,
    **hooks: Any,
) -> tuple[Trainer, Curve]:
    """Make the trainer with its progress bar, logs and curve; `guard` adds a guard over the converted linears."""
    from loka.training import Curve, JsonlLog, Progress, TensorBoard, Trainer
    from loka.training.guard import GuardCallback

    curve = Curve()
    callbacks: list[Callback] = [curve, Progress(), *([GuardCallback()] if guard else [])]
    if out is not None:
        callbacks.append(JsonlLog(out / "log.jsonl"))
        if tensorboard:
            callbacks.append(TensorBoard(out / "tensorboard"))
    return Trainer(network, dataset, settings, callbacks=callbacks, out=out, **hooks), curve


def finish(
    trainer: Trainer,
    result: TrainResult,
    recipe: Recipe,
    test: Callable[[Trainer], dict[str, float]],
    curve: Curve,
    out: Path | None,
    converted: Conversion | None,
    *,
    write: bool = True,
) -> Run:
    """Test the best weights and write the records of the run."""
    from loka import records
    from loka.measure.device import environment_of

    if result.best is not None:
        trainer.load_best()
    metrics = test(trainer)
    run = records.Run(
        name=out.name if out is not None else f"{recipe.model}-{recipe.config}",
        model=f"{recipe.model} {recipe.config}",
        data=recipe.data,
        precision=result.precision,
        seed=trainer.config.seed,
        steps=result.steps,
        examples=result.examples,
        seconds=result.seconds,
        curve=[
            records.Point(step=line.step, loss=line.loss, examples_per_second=line.examples_per_s)
            for line in curve.lines
        ],
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        low_precision_flops_share=0.0 if converted is None else converted.low_precision_share,
        environment=environment_of(trainer.model),
    )
    if out is not None and write:
        records.save(run, out / "run.json")
        for name, value in (("model", recipe), ("result", result)):
            text = json.dumps(asdict(value), indent=1, default=str) + "\n"
            records.write_atomically(out / f"{name}.json", text.encode())
    return run


def tell_kept(out: Path | None) -> None:
    """After Ctrl-C, say which checkpoint there is to resume from."""
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*")) if out is not None else []
    if kept:
        typer.echo(f"{out} keeps {kept[-1]}; the same command with --resume continues after it", err=True)
    else:
        typer.echo("nothing is kept: no checkpoint was written (--out, --checkpoint-every)", err=True)


def tell(result: TrainResult, run: Run, summary: ModSummary | None, *, as_json: bool) -> None:
    """Print the choices that were made to stderr and the results to stdout."""
    from loka import records
    from loka.cli.recovery import describe

    compiled = result.compile
    parts = ", ".join(name or "the whole model" for name in compiled.modules)
    typer.echo(f"compiled: {parts or 'nothing'} ({compiled.reason})", err=True)
    for skipped in result.damaged:
        typer.echo(f"damaged checkpoint skipped: {skipped}", err=True)
    if result.bad_batches:
        typer.echo(f"skipped {result.bad_batches} batches whose loss was not finite", err=True)
    if summary is not None:
        typer.echo(f"mods: {summary}", err=True)
    if as_json:
        typer.echo(records.to_json(run).decode())
        return
    typer.echo(f"{run.model} on {run.data}, {run.precision}, seed {run.seed}: {run.steps} steps, {run.seconds:.1f} s")
    if result.best is not None:
        best = result.best
        typer.echo(f"best valid {best['metric']} {best['value']:.5f} at step {best['step']}")
    typer.echo("test  " + "  ".join(f"{name} {value:.5f}" for name, value in run.metrics.items()))
    for recovery in summary.recovery if summary is not None else ():
        typer.echo(f"recovery  {describe(recovery)}")
