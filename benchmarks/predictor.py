"""Does the score predict the metric? Every (site, GEMM, recipe) of models trained here: the score Probe computed online beside what really happens.

    python benchmarks/predictor.py --out benchmarks/results/cpu/predictor.json --seconds 1500       continues where it stopped
    python benchmarks/predictor.py --out benchmarks/results/cpu/predictor.json --rescore            trains again, scores anew, keeps the truth
    python benchmarks/predictor.py --out benchmarks/results/cpu/predictor.json --seconds 0          no training: `harm` again from the sums in the file, and the summary

A cell is a family, a size, a hazard in the dense features, a learning rate, a number of steps and a seed, trained on Complete Journey with a Probe attached.
`predictor_truth` has what is measured, `predictor_summary` what is made of it.

Hazards: `offset` turns the first dense column into a year (1975 + 10 z), `heavy` makes the second log-normal (exp(2 z)). The file holds one row per pair, written
after each cell; the summary (rank correlations, AUC) is computed from it and never stored apart from it. The truth depends on the weights alone, so a score that
has changed is compared with the truth measured before, where training gives the same weights again (`weights` is a checksum of them). `sums` are the looks that
counted, as `loka.probe.score.score_look` gave them, so that another bound made of the same sums needs no training at all.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from predictor_summary import describe
from predictor_truth import measure_forward, measure_gradients, take_step
from torch import nn

from loka.data import load
from loka.models import build_ranker
from loka.probe import Probe
from loka.probe.score import harm_from
from loka.records import Gemm, capture_environment

BATCH, HELD_OUT, MORE_STEPS = 512, 8, 10  # examples a step, batches of 4,096 examples, steps for gradients
MODELS = (("dlrm", "small"), ("dcn", "tiny"), ("wukong", "tiny"), ("dhen", "tiny"), ("elfm", "tiny"))
HAZARDS = (("none", 1e-3, 300), ("offset", 1e-3, 300), ("heavy", 1e-3, 300), ("none", 4e-3, 300), ("none", 1e-3, 900))
OTHERS = (("dcn", "small"), ("wukong", "small"), ("dlrm", "tiny"))  # other sizes of some families


@dataclass(frozen=True)
class Cell:
    """One trained model."""

    family: str
    size: str
    hazard: str
    learning_rate: float
    steps: int
    seed: int

    @property
    def key(self) -> str:
        return "/".join(map(str, asdict(self).values()))


def cells(seeds: int = 4) -> Iterator[Cell]:
    """In an order that covers families first, then hazards with models that are cheap to train, then the others, then seeds."""
    every = [Cell(f, s, "none", 1e-3, 300, 0) for f, s in MODELS]
    for seed in range(seeds):
        every += [Cell(f, s, *how, seed) for how in HAZARDS for f, s in MODELS[:3]]
    for seed in range(seeds):
        every += [Cell(f, s, *how, seed) for how in HAZARDS for f, s in MODELS[3:]]
        every += [Cell(f, s, *how, seed) for how in HAZARDS[:3] for f, s in OTHERS]
    yield from dict.fromkeys(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no further cell after so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gradients", type=int, default=1, help="dgrad and wgrad on so many seeds")
    parser.add_argument(
        "--rescore", action="store_true", help="train the cells of the file again and replace their scores"
    )
    parser.add_argument("--cells", default="", help="only cells whose name contains this")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    held = json.loads(asked.out.read_text()) if asked.out.exists() else {"pairs": [], "weights": {}}
    done, started = set(held["weights"]), time.monotonic()
    data = load("complete-journey") if asked.seconds else None
    for cell in cells():
        if (
            asked.cells not in cell.key
            or (cell.key in done) != asked.rescore
            or time.monotonic() - started > asked.seconds
        ):
            continue
        began = time.monotonic()
        (rescore if asked.rescore else measure)(cell, data, held, cell.seed < asked.gradients)
        environment = capture_environment(threads=asked.threads)
        held["environment"] = {f: getattr(environment, f) for f in environment.__struct_fields__}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(write(held))
        print(f"{cell.key}: {time.monotonic() - began:.0f} s, {len(held['pairs'])} pairs", flush=True)
    if not asked.seconds:
        for pair in held["pairs"]:
            pair.update(describe_harm(pair["gemm"], pair))
        asked.out.write_text(write(held))
    print(describe(held["pairs"]))


def write(held: dict[str, Any]) -> str:
    rows = ",\n".join(json.dumps(pair) for pair in held["pairs"])
    head = ",\n".join(f'"{name}": {json.dumps(held[name])}' for name in ("environment", "weights"))
    return f'{{{head},\n"pairs": [\n{rows}\n]}}\n'


def measure(cell: Cell, data: Any, held: dict[str, Any], gradients: bool) -> None:
    model, optimizer, probe = train(cell, data)
    weights, report = checksum(model), score(probe)
    held_out = [hurt(b, cell.hazard) for b in take(data.valid.batches(4096, shuffle=False, seed=0), HELD_OUT)]
    sites = {site.name: probe.watch(site.name).tally.largest for site in report.sites}
    found = [(site, "fprop", recipe, truth) for site, recipe, truth in measure_forward(model, sites, held_out)]
    if gradients:
        more = list(stream(data, replace(cell, seed=cell.seed + 1000), MORE_STEPS))
        asked = {site.name: [g for g in site.gemms if g != "fprop"] for site in report.sites}
        found += measure_gradients(model, optimizer, asked, more, held_out)
    named = ("site", "gemm", "recipe")
    pairs = [{"cell": cell.key} | dict(zip(named, where, strict=True)) | truth for *where, truth in found]
    held["pairs"] += [pair | describe_score(pair, report, probe) for pair in pairs]
    held["weights"][cell.key] = weights


def rescore(cell: Cell, data: Any, held: dict[str, Any], _: bool) -> None:
    model, _, probe = train(cell, data)
    if checksum(model) != held["weights"][cell.key]:
        raise RuntimeError(
            f"{cell.key}: training gave other weights than those the truth was measured on; hint: another machine or number of threads; measure anew"
        )
    report = score(probe)
    for pair in held["pairs"]:
        if pair["cell"] == cell.key:
            pair.update(describe_score(pair, report, probe))


def train(cell: Cell, data: Any) -> tuple[nn.Module, torch.optim.Optimizer, Probe]:
    torch.manual_seed(cell.seed)
    model = build_ranker(data.schema, cell.family, cell.size)
    optimizer = torch.optim.Adam(model.parameters(), lr=cell.learning_rate)
    probe = Probe(model, every=max(cell.steps // 24, 1), rows=512, stagger=1)
    for batch in stream(data, cell, cell.steps):
        take_step(model, optimizer, batch)
        probe.step()
    probe.detach()
    return model, optimizer, probe


def score(probe: Probe) -> Any:
    return probe.evaluate(samples=3, sources=("rows",), judged_on=("rows",), gate=False).record


def checksum(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def describe_score(pair: dict[str, Any], record: Any, probe: Probe) -> dict[str, Any]:
    """What Probe said of a pair, and the sums it said it from."""
    site = next(s for s in record.sites if s.name == pair["site"])
    found = [c for c in site.candidates if (c.gemm, c.recipe) == (pair["gemm"], pair["recipe"])]
    error = next((c.mere if c.gemm == "fprop" else c.relative_l2 for c in found), None)
    sums, nats = probe.watch(site.name).tally.later(pair["gemm"], pair["recipe"])
    known = {
        "error": short(None if error is None else error.high),
        "units": record.units,
        "nats": short(nats),
        "sums": [[short(v) for v in look] for look in sums.tolist()],
    }
    return known | describe_harm(pair["gemm"], known)


def describe_harm(gemm: Gemm, known: dict[str, Any]) -> dict[str, Any]:
    """`harm` and `drift` by the present bound."""
    made = harm_from(gemm, torch.tensor(known["sums"], dtype=torch.float64).reshape(-1, 4), nats=known["nats"])
    if made is None:
        return {"harm": None, "drift": None}
    harm, mean = made
    return {"harm": [short(v) for v in (harm.value, harm.low, harm.high)], "drift": short(mean)}


def short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def stream(data: Any, cell: Cell, steps: int) -> Iterator[Any]:
    epoch, count = 0, 0
    while count < steps:
        for batch in data.train.batches(BATCH, shuffle=True, seed=cell.seed, epoch=epoch):
            if count == steps:
                return
            yield hurt(batch, cell.hazard)
            count += 1
        epoch += 1


def take(batches: Any, count: int) -> list[Any]:
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


def hurt(batch: Any, hazard: str) -> Any:
    """The batch with a hazard in its dense features."""
    if hazard == "none":
        return batch
    dense = batch.dense.clone()
    column = 0 if hazard == "offset" else 1
    z = ((dense[:, column] - dense[:, column].mean()) / dense[:, column].std().clamp(min=1e-6)).clamp(-4, 4)
    dense[:, column] = 1975 + 10 * z if hazard == "offset" else torch.exp(2 * z)
    return replace(batch, dense=dense)


if __name__ == "__main__":
    main()
