"""Another field, a surrogate of the Black-Scholes price: products within their error limits, and still a worse price.

python examples/option_pricing.py
"""

import torch
from torch import nn

import loka

torch.manual_seed(0)


def price(inputs: torch.Tensor) -> torch.Tensor:
    spot, time, volatility = inputs.unbind(1)  # strike 1, no interest
    d1 = (spot.log() + 0.5 * volatility**2 * time) / (volatility * time.sqrt())
    normal = torch.distributions.Normal(0.0, 1.0)
    return (spot * normal.cdf(d1) - normal.cdf(d1 - volatility * time.sqrt())).unsqueeze(1)


def draw(count: int) -> torch.Tensor:
    return torch.tensor([0.6, 0.05, 0.1]) + torch.rand(count, 3) * torch.tensor([0.8, 1.95, 0.4])


model = nn.Sequential(nn.Linear(3, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
probe = loka.Probe(model, every=50)
for _ in range(400):
    x = draw(512)
    loss = (model(x) - price(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probe.step()
plan, test = probe.evaluate(samples=5).plan(min_speedup=None, overrides={"4": "high"}), draw(20_000)
with torch.no_grad():
    before = float((model(test) - price(test)).abs().mean())
    print(loka.convert(model, plan))
    after = float((model(test) - price(test)).abs().mean())
print(f"mean absolute error of the price: float32 {before:.5f}, FP8 swapped in {after:.5f}")
