"""Registry of the mods by name. A new mod takes one file and one row in `MODS`."""

import ast
from collections.abc import Iterable

from loka.mods.align_shapes import AlignShapes
from loka.mods.attention_layout import AttentionLayout
from loka.mods.block_norm import UseBlockNorm
from loka.mods.feature_layout import FeatureLayout
from loka.mods.feature_products import FeatureProducts
from loka.mods.fuse import Fuse
from loka.mods.fused_dots import FuseDots
from loka.mods.hard_swish import UseHardSwish
from loka.mods.mod import Mod
from loka.mods.narrow_outputs import NarrowOutputs
from loka.mods.no_bias import NoBias
from loka.mods.norm_order import NormOrder
from loka.mods.normed_inputs import NormInputs
from loka.mods.protect_intermediates import ProtectIntermediates
from loka.mods.protect_residual import ProtectResidual
from loka.mods.shared_features import ShareFeatures
from loka.mods.stored_sums import StoreSums
from loka.mods.weighted_sums import SumWeighted

MODS: dict[str, type[Mod]] = {
    "no_bias": NoBias,
    "block_norm": UseBlockNorm,
    "hard_swish": UseHardSwish,
    "norm_order": NormOrder,
    "protect_residual": ProtectResidual,
    "protect_intermediates": ProtectIntermediates,
    "align_shapes": AlignShapes,
    "feature_layout": FeatureLayout,
    "feature_products": FeatureProducts,
    "shared_features": ShareFeatures,
    "fused_dots": FuseDots,
    "attention_layout": AttentionLayout,
    "narrow_outputs": NarrowOutputs,
    "weighted_sums": SumWeighted,
    "stored_sums": StoreSums,
    "normed_inputs": NormInputs,
    "fuse": Fuse,
}
# the same function up to rounding, and faster or as fast where they were measured: `loka.tune` applies these by itself
FREE = (
    "feature_layout",
    "feature_products",
    "shared_features",
    "fused_dots",
    "attention_layout",
    "narrow_outputs",
    "weighted_sums",
    "stored_sums",
    "normed_inputs",
)
# the architecture changes that `loka.tune(architecture=True)` applies; the model must be trained with them
CORE = ("no_bias", "block_norm", "hard_swish")


def names() -> tuple[str, ...]:
    """Return the names of all mods.

    Returns:
        The names, in the order in which the mods are best applied.

    Example:
        >>> "block_norm" in loka.mods.names()
        True
    """
    return tuple(MODS)


def find(mod: "str | Mod") -> Mod:
    """Return the mod with a given name.

    Args:
        mod: a name, or a mod, which is returned as it is.

    Returns:
        The mod. One found by name has its default options.

    Raises:
        ValueError: there is no mod of that name.

    Example:
        >>> find("no_bias").effect
        'architecture'
    """
    if isinstance(mod, str):
        if mod not in MODS:
            raise ValueError(f"there is no mod {mod!r}; the mods are {', '.join(MODS)}")
        return MODS[mod]()
    if not isinstance(mod, Mod):
        raise ValueError(
            f"expected the name of a mod or a mod, got {type(mod).__name__}; the mods are {', '.join(MODS)}"
        )
    return mod


def parse(text: str) -> Mod:
    """Parse a mod as it is written in records: `block_norm` or `block_norm(block=128)`. The inverse of `spell`.

    Args:
        text: the name, with options as keyword arguments in parentheses.

    Returns:
        The mod with these options.

    Example:
        >>> parse("block_norm(block=128)")
        UseBlockNorm(block=128, fold=True)
    """
    call = ast.parse(text, mode="eval").body
    if isinstance(call, ast.Name):
        return find(call.id)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} is not a mod with options; expected e.g. block_norm(block=128)")
    plain = type(find(call.func.id))
    return plain(**{str(option.arg): ast.literal_eval(option.value) for option in call.keywords})


def find_all(mods: "str | Mod | Iterable[str | Mod]") -> list[Mod]:
    """Return the mods for one mod, comma-separated names, or an iterable of names and mods. Repeats are an error."""
    if isinstance(mods, str):
        mods = [name.strip() for name in mods.split(",") if name.strip()]
    found = [find(mod) for mod in ([mods] if isinstance(mods, Mod) else mods)]
    twice = {mod.name for mod in found if [m.name for m in found].count(mod.name) > 1}
    if twice or not found:
        raise ValueError(
            f"given twice: {', '.join(sorted(twice))}" if twice else f"no mod given; choose from {', '.join(MODS)}"
        )
    if any(mod.name == "fuse" for mod in found[:-1]):
        raise ValueError("fuse comes last: mods after it would not reach what a fused chain runs")
    return found
