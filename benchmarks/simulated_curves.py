"""The simulation of many GPUs (loka.comms.simulation) beside published scaling curves. No curve was used to set a constant of it.

    python benchmarks/simulated_curves.py --out simulated-curves.json

From each curve its first point is taken as the measured time of one GPU's work (nothing else about the machine is measured here), the others are predicted. The collectives of the first point
are simulated too and taken off. Parameters and bytes are the models'; bandwidths are data sheets'.

The first six curves were there when the simulation was written. The eight of TensorFlow 2's BERT, all multi-node curves of its page, were added later, with the simulation as it was.

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
BERT2 = "TensorFlow2/LanguageModeling/BERT/README.md, multi-node on"
BERT_SIZE = 336_000_000
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
    later: bool = False  # added when the simulation was done


def _later(name: str, place: str, machine: str, codec: str, batch: int, points: tuple[tuple[int, int, float], ...]) -> Curve:  # fmt: skip
    source = f"{BERT2} {place}"
    return Curve(f"BERT-large (TF2), {name}", source, machine, BERT_SIZE, codec, batch, points, overlap=False, later=True)  # fmt: skip


LATER = (
    _later("128, mixed precision, DGX A100", "DGX A100 80GB", "a100-hdr", "fp16", 312,
           ((8, 32, 3803.82), (16, 16, 7551.37), (64, 4, 29711.11), (256, 1, 110280.73))),
    _later("128, TF32, DGX A100", "DGX A100 80GB", "a100-hdr", "fp32", 176,
           ((8, 64, 2062.98), (16, 32, 4084.76), (64, 8, 16134.02), (256, 2, 59569.77))),
    _later("512, mixed precision, DGX A100", "DGX A100 80GB", "a100-hdr", "fp16", 40,
           ((8, 96, 749.73), (16, 48, 1491.87), (64, 12, 5870.83), (256, 3, 22506.23))),
    _later("512, TF32, DGX A100", "DGX A100 80GB", "a100-hdr", "fp32", 22,
           ((8, 192, 431.89), (16, 96, 739.14), (64, 24, 2926.58), (256, 6, 11240.5))),
    _later("128, mixed precision, DGX-2H", "DGX-2H", "v100-dgx2", "fp16", 60,
           ((16, 64, 3528.51), (64, 16, 13370.21), (256, 4, 42697.42), (512, 2, 84223.16))),
    _later("128, FP32, DGX-2H", "DGX-2H", "v100-dgx2", "fp32", 32,
           ((16, 128, 841.72), (64, 32, 3060.49), (256, 8, 10383.57), (512, 4, 20094.14))),
    # the page's numbers of batches (96, 24) do not make its whole batch of 30,720; 48 and 12 do
    _later("512, mixed precision, DGX-2H", "DGX-2H", "v100-dgx2", "fp16", 10,
           ((16, 192, 678.35), (64, 48, 2678.29), (256, 12, 7834.72), (512, 6, 18786.93))),
    _later("512, FP32, DGX-2H", "DGX-2H", "v100-dgx2", "fp32", 4,
           ((16, 512, 180.0), (64, 128, 646.76), (256, 32, 2204.72), (512, 16, 4196.15))),
)  # fmt: skip

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


def worst(rows: list[dict[str, float]]) -> float:
    """The largest error, in percent, whatever its sign."""
    return max(abs(row["error_percent"]) for row in rows)


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
    for curve in (*CURVES, *LATER):
        rows = predict(curve)
        first, _, start = curve.points[0]
        linear = max(abs(100 * (gpus / first * start / seen - 1)) for gpus, _, seen in curve.points[1:])
        record.append({
            "curve": curve.name, "source": curve.source, "machine": curve.machine, "note": curve.note, "added_later": curve.later, "points": rows,
            "worst_error_percent": worst(rows), "worst_error_percent_of_linear_scaling": linear,
        })  # fmt: skip
        print(f"{curve.name}: worst {worst(rows):.1f} % (linear scaling: {linear:.1f} %)")
    within = [curve["curve"] for curve in record if curve["worst_error_percent"] <= 15]
    print(f"within 15 %: {len(within)} of {len(record)}")
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
