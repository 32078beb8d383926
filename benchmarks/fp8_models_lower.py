"""Puts a model of benchmarks/fp8_models.py into low precision, and says how much of it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from loka.lowp import FusedInteraction, FusedTower, Link, freeze, refuse_interaction
from loka.lowp.fused_projection import FusedProjection
from loka.lowp.linear import Linear
from loka.models.hstu import HSTULayer
from loka.models.wukong import FactorizationMachineBlock, Wukong, WukongLayer
from loka.nn import MLP, BlockNorm, HardSwish
from loka.placing import LinearOptions, convert

HIGH = ("fp32", "tf32", "bf16")
WIDE = 256
"""Linears with fewer inputs or outputs move more bytes than FP8 saves: at K = 128 a bf16 GEMM on an H200 already waits for memory."""


def lower(model: nn.Module, precision: str, mode: str, *, least: int = WIDE) -> dict[str, Any]:
    """Put the model into low precision, in place; says which parts became what. `least`: the narrowest linear that loka converts."""
    if precision == "loka-convert":
        return convert_all(model, mode, least)
    if precision.startswith("loka"):
        facts = fuse(model, least, epilogue=precision != "loka-split")
        if mode == "infer":
            freeze(model, offload=True)
        return facts | {"interactions": fuse_interactions(model)}
    if precision.startswith("torchao"):
        return lower_torchao(model, precision.removeprefix("torchao-"), mode)
    return {}


def fuse(model: nn.Module, least: int, *, epilogue: bool) -> dict[str, Any]:
    """Towers as FusedTower; the linears that are left and wide enough as FusedProjection, HSTU's uvqk together with the activation behind it."""
    towers = fuse_towers(model, least)
    projections = sum(fuse_sequence_layer(m, epilogue) for m in list(model.modules()) if isinstance(m, HSTULayer))
    inside = {
        f"{name}.{link.linear}" for name, m in model.named_modules() if isinstance(m, FusedTower) for link in m.links
    }
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name not in inside and width_of(module) >= least:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, FusedProjection.of(module))
            projections += 1
    return {"towers": towers, "projections": projections}


def width_of(linear: nn.Linear) -> int:
    return min(linear.in_features, linear.out_features)


def fuse_towers(model: nn.Module, least: int) -> int:
    """Every MLP whose layers are linear, BlockNorm, hard swish and wide enough; a prediction layer narrower than 16 stays as it is."""
    fused = 0
    for name, tower in [(name, module) for name, module in model.named_modules() if isinstance(module, MLP)]:
        links = [Link(f"layers.{index}.linear") for index in range(len(tower.layers))]
        tail: list[str] = []
        if isinstance(tower.last, nn.Linear):
            if tower.last.out_features >= 16:
                links.append(Link("last", 0, "none"))
            else:
                tail.append("last")
        if not links or min(width_of(tower.get_submodule(link.linear)) for link in links) < least:
            continue
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        # In Wukong every tower reads what a BlockNorm wrote: the norm of the products, or the norm of the last layer.
        bounded = isinstance(parent, (FactorizationMachineBlock, Wukong))
        setattr(parent, child, FusedTower.replacing(tower, links, tail=tail, bounded_input=bounded))
        fused += 1
    return fused


def fuse_sequence_layer(layer: HSTULayer, epilogue: bool) -> int:
    """HSTU: norm -> FP8 -> uvqk -> activation, and (norm * u) -> FP8 -> out."""
    activation = "hard_swish" if isinstance(layer.activation, HardSwish) else "silu"
    bounded = isinstance(layer.norm, BlockNorm)
    layer.uvqk = FusedProjection.of(layer.uvqk, activation=activation, bounded_input=bounded, epilogue=epilogue)  # type: ignore[assignment]
    layer.activation = nn.Identity()
    layer.out = FusedProjection.of(layer.out)  # type: ignore[assignment]
    return 2


def fuse_interactions(model: nn.Module) -> int:
    """Wukong layers whose examples fit into a program of the interaction kernel."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, WukongLayer)]
    fitting = [(name, layer) for name, layer in layers if refuse_interaction(layer) is None]
    for name, layer in fitting:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FusedInteraction.replacing(layer))
    return len(fitting)


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
    for name, module in model.named_modules():
        if isinstance(module, FusedTower):
            for link in module.links:
                yield ".".join(part for part in (name, link.linear) if part), 1.0
        elif isinstance(module, Linear):
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
