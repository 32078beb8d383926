"""Errors under learned distributions beside those under N(0, 1), on wide models that were trained to their end.

    python benchmarks/learned.py --root FOLDER --out FOLDER                                     on a GPU: learned_wukong.json and learned_dlrm.json, two to three minutes each
    python benchmarks/learned.py --root FOLDER --out FOLDER --families dlrm --device cpu                           nine minutes on one core
    python benchmarks/learned.py --root FOLDER --out FOLDER --device cpu --size tiny --batch 256 --steps 40        dry run

The plain models of benchmarks/trained.py on Census-Income, trained in bf16 as there; Probe watches the last steps, where the published method says that distributions have left N(0, 1) behind. Every
linear, every recipe: the guarded MERE on rows that were seen, on the copula and on the Gaussian that Probe learned, and on N(0, 1). The files are Probe's reports (`loka report` shows them); docs/published.md reads the
ratios. Speed is not measured.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from evidence import spell_command
from trained_families import FAMILIES, SIZES, open_data

from loka.probe import Probe

WATCHED = 24  # of the last steps, one in `EVERY`
EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--families", default="wukong,dlrm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", default="wide", choices=tuple(SIZES))
    parser.add_argument("--steps", type=int, help="instead of each family's own")
    parser.add_argument("--batch", type=int, help="instead of each family's own")
    parser.add_argument("--samples", type=int, default=100)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for family in a.families.split(","):
        report = watch(family, a)
        report.save(a.out / f"learned_{family}.json")
        print("\n".join(report.summary()), flush=True)


def watch(family: str, a: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Train as benchmarks/trained.py does, launched step by step, and judge what the last steps showed."""
    torch.manual_seed(0)
    kind = FAMILIES[family]
    steps = a.steps or kind.steps
    data = open_data(a.root, kind.data, family, a.size, a.device, a.batch or kind.batch)
    model = data.model(0).train()
    table, rate = model.table.weight, 1e-3
    groups = [
        {"params": [p for p in model.parameters() if p is not table], "weight_decay": 0.01, "peak": rate},
        {"params": [table], "weight_decay": 0.0, "peak": kind.table_rate * rate},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=a.device == "cuda")
    probe, warm = None, min(kind.warm_up, max(steps // 5, 1))
    for step, (inputs, labels) in enumerate(itertools.islice(data.stream(0), steps)):
        if step == max(steps - WATCHED, 0):
            probe = Probe(model, every=EVERY)
        along = max(step - warm, 0) / max(steps - warm, 1)
        factor = (step + 1) / warm if step < warm else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along))
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]
        with torch.autocast(a.device, torch.bfloat16):
            out = model(*inputs)
        data.losses(out, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if probe is not None:
            probe.step()
    assert probe is not None  # the loop has passed its last steps
    name = f"{family}, plain, {a.size}"
    return probe.evaluate(samples=a.samples, model_name=name, data_name=kind.data, command=spell_command())


if __name__ == "__main__":
    main()
