"""Tune in the middle of a training run, with gradient accumulation and torch.compile.

python examples/tune_inside_a_trainer.py
In other loops: transformers.Trainer(callbacks=[loka.integrations.hf_callback(tuning)]), lightning.Trainer(callbacks=[loka.integrations.lightning_callback(tuning)])
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import loka
from loka.integrations import TuneDuringTraining

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
compiled = torch.compile(model, backend="eager")  # on a GPU: torch.compile(model), any mode
optimizer, teacher = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(64, 1) / 8


def make(rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 64)
    return x, torch.bernoulli(torch.sigmoid(4 * x @ teacher))


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")


tuning = TuneDuringTraining([make() for _ in range(8)], after=40, step=step, out=tempfile.mkdtemp(), margin=0.02)
for _ in range(60):
    tuning.begin_step(compiled)
    optimizer.zero_grad()
    for _ in range(2):  # gradient accumulation: one optimizer step
        (step(compiled, make()).mean() / 2).backward()
    optimizer.step()
    print(tuning.end_step(compiled) or ".", end="")  # tunes once; compiled code is then recompiled once
print(f"\n{loka.revert(model)} linears ran in FP8")
