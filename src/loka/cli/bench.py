"""`loka bench`: what this machine can measure. Data loading, and where there is a GPU the kernels.

    loka bench                     data, and kernels where there is a GPU
    loka bench data --json
    loka bench kernels             see loka.cli.kernels

`data` streams the embedded data set (shuffled, batches of 4096) on one thread. The number is the median of repetitions that together take about `--seconds`.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from loka.cli.kernels import kernels

app = typer.Typer(invoke_without_command=True)
app.command("kernels")(kernels)

Seconds = Annotated[float, typer.Option(help="Time for each number.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure data loading here, and the kernels where there is a GPU."""
    if context.invoked_subcommand is not None:
        return
    data()
    import torch

    if torch.cuda.is_available():
        context.invoke(kernels)
    else:
        typer.echo("kernels: not measured, there is no GPU here")


@app.command()
def data(seconds: Seconds = 1.0, json_: AsJson = False) -> None:
    """Examples per second of the embedded data set's training stream."""
    found = _measure(measure_data, seconds)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(
        f"data: {found['examples_per_second']:,.0f} examples/s of {found['name']} on {found['threads']} thread "
        f"({found['examples']:,} examples, batches of 4096, shuffled)"
    )


def _measure(job: Callable[[float], dict[str, Any]], seconds: float) -> dict[str, Any]:
    from rich.console import Console

    if not seconds > 0:
        raise ValueError(f"--seconds {seconds}: expected a positive number")
    with Console(stderr=True).status("measuring"):
        return job(seconds)


def measure_data(seconds: float) -> dict[str, Any]:
    """Examples per second of the default data set's training stream, after its cache is warm."""
    import torch

    from loka.data import load

    data = load("complete-journey")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = sum(batch.size for batch in data.train.batches(4096, shuffle=True, seed=0))
        spent = _repeat(lambda: [None for _ in data.train.batches(4096, shuffle=True, seed=0)], seconds)
    finally:
        torch.set_num_threads(threads)
    return {"name": data.name, "examples": count, "examples_per_second": count / spent, "threads": 1}


def _repeat(job: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a job, after one run that does not count."""
    job()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
