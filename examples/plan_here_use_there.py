"""Plan on one machine, use on another: errors measured here, speeds from rows of the other machine, one JSON file between them.

python examples/plan_here_use_there.py plan.json
"""

import sys

import torch
from torch import nn

import loka
from loka import records
from loka.dispatch import Policy, export, make_plan

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 2048), nn.SiLU(), nn.Linear(2048, 2048), nn.SiLU(), nn.Linear(2048, 1))
probe = loka.Probe(model, every=1, rows=64)
model(torch.randn(64, 2048)).square().mean().backward()
probe.step()
report = probe.evaluate(
    ["tensorwise", "rowwise"], samples=2, sources=("rows",), judged_on=("rows",)
).record  # the rows it saw; it can model more

# The rows that ship with loka, for 256 times as many rows a call as were seen here: a batch of 16,384.
policy = Policy(target="NVIDIA H200", row_factor=256, min_speedup=1.05, overrides={"4": "high"})
plan = make_plan(report, policy)
print(*plan.notes, sep="\n")
print(plan.explain("0"))
print(export(plan, "torchao"))  # the same decision for people who train with torchao

path = sys.argv[1] if sys.argv[1:] else "plan.json"
records.save(plan, path)
there = records.load(path, records.Plan)  # sealed: a file that was edited or damaged is refused
try:
    loka.convert(model, there)  # on the H200 this converts; here it refuses, because its speeds are not of this machine
except ValueError as error:
    print(f"refused: {str(error).splitlines()[1].strip()}")
