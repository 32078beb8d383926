"""Probe inside your own loop: two lines in the loop, then evidence, a plan, and a page.

python examples/probe_inside_your_own_loop.py report.html
"""

import sys

import torch
from torch import nn

import loka

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
probe = loka.Probe(model, every=10)  # every site is looked at on one step in ten; the others cost one `if` each

for _ in range(60):
    x = torch.randn(256, 32)
    loss = (model(x) - x[:, :4].prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probe.step()

report = probe.evaluate(samples=5)  # 100 by default: narrower intervals
print(report)
plan = report.plan(min_speedup=None)  # accuracy only; with a measured speed-up: min_speedup=1.05
print(loka.convert(model, plan))
print(plan.explain("0"))
if sys.argv[1:]:
    report.to_html(sys.argv[1])
