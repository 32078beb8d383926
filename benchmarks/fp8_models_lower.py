"""Puts a model of benchmarks/fp8_models.py into low precision, and says how much of it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from loka import mods
from loka.lowp import chains_of
from loka.lowp.interaction import interactions_of
from loka.lowp.linear import Linear
from loka.placing import LinearOptions, calibrating, convert, freeze_model

HIGH = ("fp32", "tf32", "bf16")
WIDE = 256
"""Linears with fewer inputs or outputs move more bytes than FP8 saves: at K = 128 a bf16 GEMM on an H200 already waits for memory."""


def lower(
    model: nn.Module, precision: str, mode: str, example: tuple[Any, ...], *, least: int = WIDE
) -> dict[str, Any]:
    """Put the model into low precision, in place; says which parts became what. `least`: the narrowest linear that loka converts."""
    if precision == "loka-convert":
        return convert_all(model, mode, least)
    if precision == "loka":
        return fuse(model, mode, example, least)
    if precision.startswith("torchao"):
        return lower_torchao(model, precision.removeprefix("torchao-"), mode)
    return {}


def fuse(model: nn.Module, mode: str, example: tuple[Any, ...], least: int) -> dict[str, Any]:
    """What `loka.mods.Fuse` places: chains, the linears that are left and wide enough, and Wukong's interactions around its towers."""
    mods.apply(model, mods.Fuse(linears=least, narrow=least), example=example)
    chains = [chain for _, chain in chains_of(model)]
    if mode == "infer":
        if not all(chain.primed for chain in chains):
            with calibrating(model), torch.no_grad():
                model(*example)
        freeze_model(model, offload=True)
    towers = sum(len(chain.links) > 1 for chain in chains)
    return {"towers": towers, "projections": len(chains) - towers, "interactions": len(list(interactions_of(model)))}


def width_of(linear: nn.Linear) -> int:
    return min(linear.in_features, linear.out_features)


def convert_all(model: nn.Module, mode: str, least: int) -> dict[str, Any]:
    """`loka.convert` with one recipe and nothing fused: what a user's model gets without being rewritten.

    Training quantises the weights in every step, as after an optimiser; a cache of them would be free here, since nothing changes the weights.
    """
    options = LinearOptions(weights="fresh" if mode == "train" else "step")

    def wide(module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and width_of(module) >= least

    summary = convert(model, recipe="tensorwise", module_filter_fn=wide, options=options)
    return {"converted": len(summary.converted)}


def lower_torchao(model: nn.Module, recipe: str, mode: str) -> dict[str, Any]:
    """torchao on every linear it can multiply: both widths multiples of 16, which leaves out the prediction layer."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    wanted = {n for n, m in linears.items() if m.in_features % 16 == 0 and m.out_features % 16 == 0}
    if mode == "train":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda module, name: name in wanted,
        )
    else:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

        granularity = PerRow() if recipe == "rowwise" else PerTensor()
        quantize_(
            model,
            Float8DynamicActivationFloat8WeightConfig(granularity=granularity),
            filter_fn=lambda module, name: isinstance(module, nn.Linear) and name in wanted,
        )
    return {"converted": len(wanted)}


def find_fp8(model: nn.Module) -> dict[str, float]:
    """The linears of a lowered model by their names before, and the share of their three GEMMs that runs in FP8, read off the modules."""
    return dict(_fp8_of(model))


def _fp8_of(model: nn.Module) -> Iterator[tuple[str, float]]:
    for _, chain in chains_of(model):
        for link in chain.links:
            yield link.linear, 1.0
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            bound = (module.binding.fprop, module.binding.dgrad, module.binding.wgrad)
            yield name, sum(gemm is not None for gemm in bound) / 3 if module.training else float(bound[0] is not None)
        elif type(module).__name__ == "Float8Linear" or (
            isinstance(module, nn.Linear) and type(module.weight).__module__.startswith("torchao")
        ):
            yield name, 1.0


def describe_share(fp8: dict[str, float], flops: dict[str, float], total: float) -> dict[str, Any]:
    """How much of what is multiplied runs in FP8: of all products (attention and interactions too), and of the linears alone. `flops`: forward, by linear."""
    if unknown := sorted(set(fp8) - set(flops)):
        raise ValueError(f"in FP8 but not among the linears that were counted: {', '.join(unknown)}")
    low = sum(flops[name] * share for name, share in fp8.items())
    facts = {
        "fp8_share": low / total,
        "fp8_share_of_linears": low / sum(flops.values()),
        "fp8_linears": f"{len(fp8)} of {len(flops)}",
    }
    kept = sorted((name for name in flops if not fp8.get(name)), key=lambda name: -flops[name])
    return facts | ({"kept": {name: flops[name] / total for name in kept}} if fp8 else {})
