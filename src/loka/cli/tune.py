"""`loka tune`: make a model faster with FP8 in one command, and verify its quality.

    loka tune wukong:tiny --out runs/tuned --train-steps 40 --seconds 60
    loka tune mine.model:build --data mine.data:batches --loss mine.loss:mean_squared --out runs/mine
    loka tune wukong:tiny --target "NVIDIA H200" --row-factor 16 --train-steps 40 --out runs/planned
    loka tune dlrm:small --serve --checkpoint runs/dlrm/model.safetensors --out runs/served  # then loka serve runs/served/ranker

Observes the model, chooses the fastest safe implementation of each unit, verifies the whole model against 16-bit, and
writes plan.json, conversion.json, tuning.json and report.html to `--out`. With `--serve`, a ranking model on a built-in
data set is also written to ranker/, for `loka serve` and `loka export`. Measurements are saved at once: after Ctrl-C
the same command continues. With `--target`, for a GPU that is not in this machine, units are chosen by estimated speeds
and labelled so; it is the plan to try first there. The model should be trained: `--checkpoint` loads weights,
`--train-steps` trains first. stdout carries the table (with `--json` the record). Exit 0 if something was converted, or
rewritten in 16-bit (the first line says which); 1 if the model is unchanged (stdout says why); 2 if the request is
invalid.
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from loka.cli.places import claim_folder


def tune(
    model: Annotated[str, typer.Argument(help="wukong:small, dlrm, hstu:small, ... or pkg.module:factory.")],
    out: Annotated[Path, typer.Option(help="Folder for plan, conversion, record, report and evidence.")],
    data: Annotated[
        str | None, typer.Option(help="Data set, or pkg.module:batches; default: complete-journey.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="pkg.module:fn(output, targets); default: BCE of logits.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Tune for inference: calibrate and freeze.")] = False,
    architecture: Annotated[
        bool, typer.Option("--architecture", help="Also apply mods that change the architecture.")
    ] = False,
    margin: Annotated[float, typer.Option(help="Relative change of the loss that counts as equivalent.")] = 0.0002,
    seconds: Annotated[float, typer.Option(help="Time budget for timing kernels and steps.")] = 180.0,
    batches: Annotated[int, typer.Option(help="Held-out batches; half choose, half verify.")] = 32,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights to tune: folder of a checkpoint, or a .safetensors file.")
    ] = None,
    train_steps: Annotated[int, typer.Option(help="Train this many steps first, with AdamW.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of --train-steps.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 1024,
    train: Annotated[
        int, typer.Option(help="Steps to train copies of the model in both precisions, to verify FP8 gradients.")
    ] = 0,
    target: Annotated[
        str | None, typer.Option(help='Plan for another GPU, e.g. "NVIDIA H200", by estimated speeds.')
    ] = None,
    row_factor: Annotated[
        float, typer.Option(help="With --target: rows of a batch there, as a multiple of --batch-size.")
    ] = 1.0,
    tables: Annotated[bool, typer.Option("--tables", help="Also choose the row format of embedding tables.")] = False,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Also choose codecs for collectives between ranks.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also compile with max-autotune and coordinate descent.")
    ] = False,
    cuda_graph: Annotated[
        bool, typer.Option(help="Whether your step will run in a CUDA graph; otherwise launch overhead counts too.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model option, e.g. norm=block.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="Data set option, e.g. rows=1000.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Make a model faster with FP8, and verify its quality."""
    import torch

    from loka import records
    from loka.cli.convert import load_weights_from, say_if_untrained
    from loka.cli.demo import Lines
    from loka.cli.subject import load_subject
    from loka.cli.train import parse_options
    from loka.tuning import tune as run

    claim_folder("--out", out)
    if row_factor != 1 and target is None:
        raise ValueError(f"--row-factor {row_factor:g} needs --target, the GPU it refers to")
    if train_steps < 0 or batches < 2:  # before the model is trained
        raise ValueError(f"--train-steps {train_steps} --batches {batches}: expected at least 0 and 2")
    if not (margin > 0 and seconds > 0):
        raise ValueError(f"--margin {margin:g} --seconds {seconds:g}: expected numbers above 0, e.g. 0.0002 and 60")
    subject = load_subject(
        model, data, batch_size=batch_size, seed=seed, loss=loss, device=device, root=data_root, model_options=parse_options(set_),
        data_options=parse_options(data_option),
    )  # fmt: skip
    if not train_steps:
        say_if_untrained(model, checkpoint, "--train-steps 200, or --checkpoint FOLDER")
    if checkpoint is not None:
        load_weights_from(subject.model, checkpoint, "--checkpoint")
    talk = None if sys.stderr.isatty() else Lines()  # None: tune shows a bar in a terminal
    if train_steps:
        if talk is None:
            typer.echo(f"training {train_steps} steps first", err=True)
        optimizer = torch.optim.AdamW(subject.model.parameters(), lr=learning_rate)
        for number, batch in enumerate(islice(subject.stream("train"), train_steps)):
            if talk is not None:
                talk("train first", number, train_steps)
            optimizer.zero_grad()
            subject.loss(batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    held = list(islice(subject.batches("valid"), batches)) or list(islice(subject.batches("train"), batches))
    tuned = run(
        subject.model,
        held,
        step=lambda network, batch: subject.job.lose(network, batch),
        metric=_measure_first(subject),
        train=train,
        margin=margin,
        architecture=architecture,
        target="serve" if serve else "train",
        seconds=seconds,
        tables=tables,
        collectives=collectives,
        thorough=thorough,
        cuda_graph=cuda_graph,
        estimate_for=target,
        row_factor=row_factor,
        out=out,
        progress=talk,
    )
    typer.echo(records.to_json(tuned.record).decode() if json_ else str(tuned))
    if serve and target is None:
        _write_ranker(tuned, subject, out / "ranker", parse_options(set_))
    made = [
        out / name for name in ("plan.json", "conversion.json", "tuning.json", "evidence.json", "report.html", "ranker")
    ]
    typer.echo(f"written: {', '.join(str(path) for path in made if path.exists())}", err=True)
    if tuned.conversion is None:
        raise typer.Exit(1)


def _measure_first(subject: Any) -> Any:
    """Return the job's first metric as a function with the metric's name, which `tune` prints."""
    name, values = next(iter(subject.job.metrics.items()))

    def measure(network: Any, batch: Any) -> Any:
        return values(network, batch).reshape(-1)

    measure.__name__ = name
    return measure


def _write_ranker(tuned: Any, subject: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write the tuned model for `loka serve`, if it reads the columns of a built-in data set, which define requests."""
    from loka.cli.jobs import RankingJob
    from loka.cli.subject import split_name
    from loka.serving import save_ranker

    if not isinstance(subject.job, RankingJob):
        typer.echo(
            f"ranker/ not written for loka serve: {subject.name} does not read a built-in ranking data set", err=True
        )
        return
    family, size = split_name(subject.name)
    plan = None if tuned.conversion is None else tuned.plan
    named = {"factory": subject.name} if family is None else {"family": family, "size": size}
    save_ranker(tuned.model, subject.job.opened.schema, folder, options=options, plan=plan, **named)
