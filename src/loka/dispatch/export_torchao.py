"""Export a plan to torchao: which linears `convert_to_float8_training` swaps, and an equivalent `Float8LinearConfig`.

torchao's named recipes are not bitwise ours (as of 0.17 to 0.19): `tensorwise` casts output gradients to E5M2, both
rowwise recipes round scales down to powers of two, and all of them use fast accumulation in the forward GEMM only. Its
configuration can express ours, so the exported text contains `config_for` next to the filter.
`Float8LinearConfig.from_recipe_name` would give a different recipe of the same granularity.

`torch._scaled_mm` requires K and N to be multiples of 16, and torchao does not pad by default: other sites are listed
and left in high precision.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from loka.dispatch.recipe import RECIPES, way_of
from loka.records import Plan, SitePlan
from loka.records.prose import name_some

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ALIGNMENT = 16
ModuleFilter = Callable[[nn.Module, str], bool]

_CONFIG = '''

def config_for(recipe):
    """As the plan was judged: E4M3 gradients, scales as they are (no powers of two), fast accumulation except in weight gradients."""
    import torch
    from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType

    fast, exact = Float8GemmConfig(use_fast_accum=True), Float8GemmConfig(use_fast_accum=False)
    granularity = ScalingGranularity.TENSORWISE if recipe == "tensorwise" else ScalingGranularity.AXISWISE
    cast = CastConfig(scaling_granularity=granularity, target_dtype=torch.float8_e4m3fn)
    more = {}
    if recipe == "rowwise_with_gw_hp":
        high = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=torch.float8_e4m3fn)
        more["cast_config_weight_for_grad_input"] = CastConfig(target_dtype=torch.float8_e4m3fn)
        more["cast_config_input_for_grad_weight"] = high
        more["cast_config_grad_output_for_grad_weight"] = high
    return Float8LinearConfig(
        cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=cast,
        gemm_config_output=fast, gemm_config_grad_input=fast, gemm_config_grad_weight=exact, **more,
    )
'''


@dataclass(frozen=True)
class TorchaoExport:
    """Sites by recipe, and sites that torchao cannot run as planned. `str()` gives Python source: filter and config."""

    recipes: dict[str, list[str]]
    left_out: dict[str, str]

    def module_filter_fn(self, recipe: str) -> ModuleFilter:
        """Return the `module_filter_fn` of a recipe for `convert_to_float8_training`; `str(self)` has its config."""
        if recipe not in self.recipes:
            raise ValueError(
                f"the plan has no site for torchao's {recipe!r}; it has {', '.join(self.recipes) or 'none'}"
            )
        names = frozenset(self.recipes[recipe])
        return lambda module, fqn: fqn in names

    def __str__(self) -> str:
        lines = [
            "# Made by loka from a plan. One call per recipe in SITES:",
            "#     convert_to_float8_training(model, config=config_for(recipe), module_filter_fn=filter_for(recipe))",
            "# torchao's own recipes of these names differ: from_recipe_name gives E5M2 gradients (tensorwise) or scales",
            "# that are powers of two (rowwise), and fast accumulation in the forward GEMM only.",
        ]
        lines += [f"# left in high precision: {name}: {why}" for name, why in self.left_out.items()]
        listed = (f"    {recipe!r}: {sorted(names)!r}," for recipe, names in self.recipes.items())
        lines += ["SITES = {", *listed, "}", "", ""]
        lines += [
            "def filter_for(recipe):",
            "    names = frozenset(SITES[recipe])",
            "    return lambda module, fqn: fqn in names",
        ]
        return "\n".join(lines) + "\n" + _CONFIG


def misaligned(site: SitePlan) -> str | None:
    """Return why a site's shape does not meet the alignment of FP8 tensor cores, or None."""
    wrong = [f"{name} {size}" for name, size in (("K", site.k), ("N", site.n)) if size % ALIGNMENT]
    return f"{' and '.join(wrong)}: not a multiple of {ALIGNMENT}" if wrong else None


def refuse_chains(plan: Plan) -> None:
    """Raise ValueError if a plan has chains: an export without them would be a different plan."""
    if chained := [name for unit in plan.units for name in unit.linears]:
        raise ValueError(
            f"the plan runs {name_some(chained, 6)} in FP8 chains, which no other tool can; hint: "
            "report.plan(chains=False), or loka plan --no-chains, decides every linear by itself"
        )


def to_torchao(plan: Plan) -> TorchaoExport:
    """Group the sites whose GEMMs all match one of torchao's recipes. Raises ValueError for a plan with chains."""
    refuse_chains(plan)
    recipes: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for site in plan.sites:
        if not site.quantized:
            continue
        found = next((name for name in TORCHAO_RECIPES if _matches_recipe(site, name)), None)
        why = misaligned(site)
        if found is None:
            spelled = ", ".join(f"{c.gemm} {f'{c.a} @ {c.b}' if c.quantized else 'high'}" for c in site.choices)
            left_out[site.site] = f"no recipe of torchao runs {spelled}"
        elif why is not None:
            left_out[site.site] = f"{why}, which torchao requires (it does not pad by default)"
        else:
            recipes.setdefault(found, []).append(site.site)
    return TorchaoExport({name: recipes[name] for name in TORCHAO_RECIPES if name in recipes}, left_out)


def _matches_recipe(site: SitePlan, recipe: str) -> bool:
    for choice in site.choices:
        way = RECIPES[recipe].operands(choice.gemm)
        if way_of(choice) != (None if way is None else way.on(choice.backend)):
            return False
    return True
