"""The table of docs/foreign-models.md: for every model what each mod does, and how far the loop goes.

    python tests/foreign/table.py            prints it; libraries that are missing are left out

`make test-foreign` runs the tests and prints this.
"""

import sys
import warnings
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import loka
from foreign.catalog import BUILDERS, build
from loka import mods

SHORT = {"exact": "exact", "rounding": "rounding", "architecture": "other function"}


def tell_mod(name: str, mod: str) -> str:
    foreign = build(name)
    summary = mods.apply(foreign.model, mod, example=foreign.example()).summary
    effects = Counter(change.effect for change in summary.changed)
    undone = sum("undone" in left.why for left in summary.left)
    parts = [f"{count} {SHORT[effect]}" for effect, count in effects.items()]
    parts += [f"{len(summary.left)} left"] * bool(summary.left) + [f"{undone} undone"] * bool(undone)
    return ", ".join(parts) or "-"


def tell_loop(name: str) -> tuple[str, str]:
    """Sites that Probe sees of all matrices that are multiplied with (no embedding tables), and linears in low precision."""
    foreign = build(name)
    model, optimizer = foreign.model, torch.optim.AdamW(foreign.model.parameters(), lr=1e-3)
    probe = loka.Probe(model, every=1)
    for step in range(3):
        optimizer.zero_grad()
        foreign.loss(foreign.example(step)).backward()
        optimizer.step()
        probe.step()
    probe.detach()
    report = probe.evaluate(["tensorwise", "rowwise"], samples=5)
    summary = loka.convert(model, report.plan(min_speedup=None))
    loka.revert(model)
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    sites = {id(model.get_submodule(site.name).weight) for site in report.record.sites}
    matrices = {id(p) for p in model.parameters() if p.dim() == 2 and (id(p) not in tables or id(p) in sites)}
    return (
        f"{len(report.record.sites)} of {len(matrices)}",
        f"{len(summary.converted)} of {len(summary.converted) + len(summary.kept)}",
    )


def main() -> None:
    warnings.simplefilter("ignore")
    names = mods.names()
    rows = []
    for name in BUILDERS:
        try:
            told = [tell_mod(name, mod) for mod in names]
            rows.append((name, *told, *tell_loop(name)))
        except pytest.skip.Exception as missing:
            print(f"{name}: {missing}", file=sys.stderr)
    print(f"| model | {' | '.join(names)} | sites probed of matrices | linears converted |")
    print("|---" * (len(names) + 3) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    libraries = ("deepctr-torch", "torchrec", "fbgemm-gpu-cpu", "transformers", "recbole", "torchfm", "torch")
    print("\nVersions: " + ", ".join(f"{library} {_version(library)}" for library in libraries))


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
