"""`loka simulate`: estimate how a training step scales to many GPUs, and whether low-precision collectives pay off.

    loka simulate --forward 4 --backward 8 --dense 60e6 --embeddings 13.6e6 --machine h200-ndr --gpus 8,64,512,1024

Nothing runs on those machines. Times are milliseconds that you measured on one GPU, at its share of the batch. stdout
has one line for each number of GPUs and codec, or JSON with `--json`.
"""

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer


def simulate(
    forward: Annotated[float, typer.Option(help="Milliseconds of the forward pass on one GPU, lookups included.")],
    backward: Annotated[float, typer.Option(help="Milliseconds of the backward pass.")],
    update: Annotated[float, typer.Option(help="Milliseconds of the optimizer step.")] = 0.0,
    dense: Annotated[float, typer.Option(help="Number of parameters outside embedding tables.")] = 0.0,
    embeddings: Annotated[
        float, typer.Option(help="Elements of one GPU's pooled embeddings: batch x features x width.")
    ] = 0.0,
    strategy: Annotated[str, typer.Option(help="Parallelism of the dense part: ddp or fsdp.")] = "ddp",
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Whether dense collectives overlap with computation.")
    ] = True,
    machine: Annotated[str, typer.Option(help="Kind of machine; an unknown name lists them.")] = "h200-ndr",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, comma-separated.")] = "8,64,256,1024",
    codecs: Annotated[str, typer.Option(help="Codecs to compare, comma-separated.")] = "fp32,bf16,e4m3:1x128:pow2",
    json_: Annotated[bool, typer.Option("--json", help="Print the simulated steps as JSON.")] = False,
) -> None:
    """Simulate a training step on many GPUs."""
    from loka.cli.serve import parse_sizes
    from loka.comms.simulation import MACHINES, Work, compare_codecs

    if machine not in MACHINES:
        raise ValueError(f"unknown machine {machine!r}; expected one of {', '.join(MACHINES)}")
    given = {"--forward": forward, "--backward": backward, "--update": update, "--dense": dense}
    for option, value in (given | {"--embeddings": embeddings}).items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{option} {value:g}: expected a finite number, 0 or more")
    if not (dense or embeddings):
        raise ValueError("no rank would send anything; expected --dense, --embeddings or both, e.g. --dense 60e6")
    work = Work(
        forward / 1e3, backward / 1e3, update / 1e3, dense=int(dense), embeddings=int(embeddings),
        accumulate=accumulate, strategy=strategy, overlap=overlap,
    )  # fmt: skip
    counts = parse_sizes("--gpus", gpus) or ()
    found = compare_codecs(work, MACHINES[machine], gpus=counts, codecs=codecs.split(","))
    typer.echo(f"a simulation from data sheets ({MACHINES[machine].source}), not a measurement", err=True)
    if json_:
        steps = [{**asdict(step), "step": step.step} for _, by_codec, _ in found for step in by_codec.values()]
        typer.echo(json.dumps({"simulation": True, "machine": machine, "steps": steps}))
        return
    for _, by_codec, best in found:
        for step in by_codec.values():
            typer.echo(str(step))
        typer.echo(f"  best: {best} (the simplest within 1 % of the shortest step)")
