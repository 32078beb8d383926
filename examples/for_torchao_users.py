"""For torchao users: the same recipe names and the same filter, plus measurements.

torchao                                                              loka
convert_to_float8_training(m, config=from_recipe_name("rowwise"),    convert(m, recipe="rowwise",
                           module_filter_fn=f)                               module_filter_fn=f)

python examples/for_torchao_users.py
"""

import torch
from torch import nn

import loka
from loka.dispatch.export import to_torchao

torch.manual_seed(0)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))


def keep_the_head(module: nn.Module, fqn: str) -> bool:  # torchao's signature, unchanged
    return fqn != "4"


print(loka.convert(build(), recipe="rowwise", module_filter_fn=keep_the_head))

# In addition: find out which of your linears are accurate enough on your data, and export the result to torchao.
model = build()
probe = loka.Probe(model, keep_the_head, every=1)
model(torch.randn(256, 64)).square().mean().backward()
probe.step()
plan = probe.evaluate(["tensorwise", "rowwise"], samples=5).plan(min_speedup=None, chains=False)
exported = to_torchao(plan)
print(exported)
for recipe in exported.recipes:
    chosen = [name for name, m in model.named_modules() if exported.module_filter_fn(recipe)(m, name)]
    print(f"convert_to_float8_training(model, from_recipe_name({recipe!r}), module_filter_fn) swaps {chosen}")
