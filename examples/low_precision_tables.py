"""Train a small ranker with int8 embedding rows: a quarter of the memory, no float32 copy, stochastic rounding.

python examples/low_precision_tables.py
"""

import torch
from torch import nn

from loka.kernels.embedding_update import Rule
from loka.nn.table_optimizer import TableOptimizer
from loka.nn.tables import quantize_tables

torch.manual_seed(0)
taste = torch.randn(2000)


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(2000, 64, mode="mean")
        self.tower = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        return self.tower(self.items(history)).squeeze(1)


model = Ranker()
print("swapped", quantize_tables(model, rows="int8:row"))
optimizers = torch.optim.AdamW(model.tower.parameters()), TableOptimizer(model, Rule("rowwise_adagrad", lr=0.05))
for step in range(150):
    history = torch.randint(0, 2000, (256, 8))
    loss = nn.functional.binary_cross_entropy_with_logits(model(history), (taste[history].mean(1) > 0).float())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1:3}  loss {loss.item():.4f}")
print(f"{model.items.rows.bytes / (2000 * 64 * 4):.3f} of float32's bytes")
Ranker().load_state_dict(model.state_dict())  # it is a plain checkpoint
