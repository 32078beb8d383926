"""Plan on one machine and use the plan on another: errors are measured here, speeds come from rows of the other machine.

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
).record  # judged only on the rows it saw; by default also on learned distributions

# Speeds from the database that ships with loka, for calls with 256 times as many rows as here: a batch of 16,384.
policy = Policy(target="NVIDIA H200", row_factor=256, min_speedup=1.05, overrides={"4": "high"})
plan = make_plan(report, policy)
print(*plan.notes, sep="\n")
print(plan.explain("0"))
print(export(plan, "torchao"))  # the same decisions as a torchao configuration

path = sys.argv[1] if sys.argv[1:] else "plan.json"
records.save(plan, path)
there = records.load(path, records.Plan)  # sealed: loading a file that was edited or damaged raises an error
try:
    loka.convert(model, there)  # works on the H200; here it raises, because the plan is for another machine
except ValueError as error:
    print(f"refused: {str(error).splitlines()[1].strip()}")
