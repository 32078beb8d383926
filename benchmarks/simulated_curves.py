"""The simulation of many GPUs (loka.comms.simulation) beside published scaling curves. No curve was used to set a constant of it.

    python benchmarks/simulated_curves.py --out simulated-curves.json

From each curve its first point is taken as the measured time of one GPU's work (nothing else about the machine is measured here), the others are predicted. The collectives of the first point
are simulated too and taken off. Parameters and bytes are the models'; bandwidths are data sheets'.

Then, for models whose training step was timed on an H200 (results/h200/zoo_training.json and zoo_training_max.json, loka's step; a third of it forward), which codec of embeddings and gradients would pay on which network.

The curves: NVIDIA DeepLearningExamples, https://github.com/NVIDIA/DeepLearningExamples, commit 729963dd47e7c8bd462ad10bfac7a7b0b604e6dd.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from evidence import describe_run

from loka.comms.simulation import MACHINES, Work, compare_codecs, simulate

BERT = "TensorFlow/LanguageModeling/BERT/README.md, multi-node on DGX A100 40GB"
XL = "PyTorch/LanguageModeling/Transformer-XL/README.md"
DLRM = "PyTorch/Recommendation/DLRM/README.md, DGX-2, large model, mixed precision"


@dataclass(frozen=True)
class Curve:
    """Points are (GPUs, batches accumulated, published examples or tokens a second)."""

    name: str
    source: str
    machine: str
    dense: int
    codec: str  # of the gradients, as the published run sent them
    batch: int  # examples or tokens of a GPU in one batch
    points: tuple[tuple[int, int, float], ...]
    overlap: bool = True
    embeddings: int = 0
    shrinks: bool = False  # strong scaling: the whole batch is fixed
    note: str = ""


CURVES = (
    Curve("BERT-large, sequences of 128, mixed precision", BERT, "a100-hdr", 336_000_000, "fp16", 64,
          ((8, 128, 2871.89), (32, 32, 11159.0), (128, 8, 41144.0), (256, 4, 77479.87)), overlap=False),
    Curve("BERT-large, sequences of 128, TF32", BERT, "a100-hdr", 336_000_000, "fp32", 64,
          ((8, 128, 1889.71), (32, 32, 7532.0), (128, 8, 28605.62), (256, 4, 53585.82)), overlap=False),
    Curve("Transformer-XL large, mixed precision", f"{XL}, 8x DGX-2H", "v100-dgx2", 257_000_000, "fp16", 4 * 384,
          ((16, 1, 154950.0), (32, 1, 307520.0), (64, 1, 605530.0), (128, 1, 1189700.0))),
    Curve("Transformer-XL large, FP32", f"{XL}, 8x DGX-2H", "v100-dgx2", 257_000_000, "fp32", 4 * 384,
          ((16, 1, 69070.0), (32, 1, 136960.0), (64, 1, 270120.0), (128, 1, 514500.0))),
    Curve("Transformer-XL large, mixed precision, one node, 2 sequences a GPU", f"{XL}, DGX-1 16GB", "v100-dgx1", 257_000_000, "fp16", 2 * 384,
          ((1, 1, 6907.0), (2, 1, 11272.0), (4, 1, 22530.0), (8, 1, 40920.0)),
          note="PCIe and uneven NVLink rings between two GPUs of a DGX-1, and a host that is busy, are not in the simulation"),
    Curve("DLRM large, whole batch of 65,536", DLRM, "v100-dgx2", 2_368_897, "fp16", 8192, ((8, 1, 7_930_000.0), (16, 1, 10_800_000.0)),
          embeddings=26 * 128 * 8192, shrinks=True,
          note="half the batch does not take half the time; the simulation wants the time at the batch a GPU has"),
)  # fmt: skip


def predict(curve: Curve) -> list[dict[str, float]]:
    """Published and simulated throughput at every point after the first."""
    machine = MACHINES[curve.machine]
    gpus, accumulate, published = curve.points[0]
    total = curve.batch * accumulate * gpus / published
    free = Work(0.0, 0.0, dense=curve.dense, embeddings=curve.embeddings, accumulate=accumulate, overlap=False)
    (bare,) = simulate(free, machine, gpus=(gpus,), codec=curve.codec)
    sent = bare.tables + (0.0 if curve.overlap else bare.dense)
    one = (total - sent) / accumulate
    rows = []
    for n, batches, seen in curve.points[1:]:
        share = gpus / n if curve.shrinks else 1.0
        work = replace(
            free, forward=one * share / 3, backward=2 * one * share / 3, accumulate=batches, overlap=curve.overlap,
            embeddings=int(curve.embeddings * share),
        )  # fmt: skip
        (step,) = simulate(work, machine, gpus=(n,), codec=curve.codec)
        simulated = curve.batch * share * batches * n / step.step
        rows.append(
            {"gpus": n, "published": seen, "simulated": simulated, "error_percent": 100 * (simulated / seen - 1)}
        )
    return rows


@dataclass(frozen=True)
class Timed:
    """A model of benchmarks/zoo.py: its row in zoo_training.json or zoo_training_max.json, parameters outside tables, and pooled embeddings of its batch."""

    name: str
    dense: int
    embeddings: int


TIMED = (
    Timed("dlrm", 2_368_897, 16384 * 26 * 128),
    Timed("wukong", 116_501_505, 8192 * 128 * 128),
    Timed("cross", 49_221_121, 8192 * 3456),
    Timed("encoder", 50_385_921, 64 * 256 * 1024),
)
NETWORKS, SIZES = ("h200-ndr", "h200-hdr", "h200-100g"), (8, 64, 256, 1024)


def choose_codecs() -> list[dict[str, object]]:
    """The codec that would pay, for each timed model, network and number of GPUs, and what it would save beside bf16."""
    results = Path(__file__).parent / "results" / "h200"
    timed = [row for name in ("zoo_training", "zoo_training_max") for row in json.loads((results / f"{name}.json").read_text())["rows"]]  # fmt: skip
    milliseconds = {row["model"]: row["ms"] for row in timed if row["way"] == "loka" and "ms" in row}
    rows: list[dict[str, object]] = []
    for model in TIMED:
        step = milliseconds[model.name] / 1e3
        work = Work(step / 3, 2 * step / 3, dense=model.dense, embeddings=model.embeddings)
        for network in NETWORKS:
            for gpus, steps, best in compare_codecs(work, MACHINES[network], gpus=SIZES):
                times = {codec: 1e3 * simulated.step for codec, simulated in steps.items()}
                rows.append({"model": model.name, "network": network, "gpus": gpus, "pays": best, "milliseconds": times,
                             "saved_beside_bf16_percent": 100 * (1 - times[best] / times["bf16"])})  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    record = []
    for curve in CURVES:
        rows = predict(curve)
        worst = max(abs(row["error_percent"]) for row in rows)
        linear = max(
            abs(100 * (c / curve.points[0][0] * curve.points[0][2] / seen - 1)) for c, _, seen in curve.points[1:]
        )
        record.append({
            "curve": curve.name, "source": curve.source, "machine": curve.machine, "note": curve.note, "points": rows,
            "worst_error_percent": worst, "worst_error_percent_of_linear_scaling": linear,
        })  # fmt: skip
        print(f"{curve.name}: worst {worst:.1f} % (linear scaling: {linear:.1f} %)")
    codecs = choose_codecs()
    for row in codecs:
        print(
            f"simulated: {row['model']:8} {row['network']:10} {row['gpus']:5} GPUs: {row['pays']} ({row['saved_beside_bf16_percent']:.0f} % beside bf16)"
        )
    out.write_text(
        json.dumps(
            {"environment": describe_run("cpu"), "simulation": True, "curves": record, "codecs": codecs}, indent=1
        )
        + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
