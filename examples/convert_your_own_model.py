"""Convert your own model with one recipe, and revert it. The checkpoint format does not change.

python examples/convert_your_own_model.py
"""

import torch
from torch import nn

import loka

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
x = torch.randn(128, 64)
names = list(model.state_dict())
before = model(x).detach()

# The last linear makes the prediction. It is cheap, and its rounding errors go directly into the result.
print(loka.convert(model, recipe="rowwise", module_filter_fn=lambda module, name: name != "4", example=x))

after = model(x)
print(f"relative change of the output: {float((after.detach() - before).norm() / before.norm()):.4f}")
assert list(model.state_dict()) == names  # nothing was renamed: checkpoints load in both directions

after.square().mean().backward()  # input and weight gradients run in FP8 too
loka.revert(model)
assert torch.equal(model(x), before)  # bit-identical to the original
