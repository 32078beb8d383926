"""Probe inside your own training loop, then make a report, a plan and a conversion.

python examples/probe_inside_your_own_loop.py report.html
"""

import sys

import torch
from torch import nn

import loka

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
probe = loka.Probe(model, every=10)  # samples one step in ten; on other steps a site costs one `if`

for _ in range(60):
    x = torch.randn(256, 32)
    loss = (model(x) - x[:, :4].prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probe.step(loss)  # given the loss, it predicts how much FP8 would change it

report = probe.evaluate(samples=5)  # the default of 100 gives narrower intervals
print(report)
plan = report.plan(min_speedup=None)  # accuracy only; min_speedup=1.05 requires a measured speed-up
print(loka.convert(model, plan))
print(plan.explain("0"))
if sys.argv[1:]:
    report.to_html(sys.argv[1])
