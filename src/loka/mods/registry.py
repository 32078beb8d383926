"""The mods by name; adding one is one file and one row."""

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
from loka.mods.protect_intermediates import ProtectIntermediates
from loka.mods.protect_residual import ProtectResidual
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
    "fused_dots": FuseDots,
    "attention_layout": AttentionLayout,
    "narrow_outputs": NarrowOutputs,
    "weighted_sums": SumWeighted,
    "fuse": Fuse,
}
# the same function up to rounding, and never slower: taken without asking
FREE = ("feature_layout", "feature_products", "fused_dots", "attention_layout", "narrow_outputs", "weighted_sums")
CORE = ("no_bias", "block_norm", "hard_swish")


def names() -> tuple[str, ...]:
    """All mods, in the order in which they are best applied.

    Returns:
        Their names.

    Example:
        >>> "block_norm" in loka.mods.names()
        True
    """
    return tuple(MODS)


def find(mod: "str | Mod") -> Mod:
    """A mod by name, or the mod itself.

    Args:
        mod: either.

    Returns:
        The mod, with its default options where a name is given.

    Raises:
        ValueError: no such mod.

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
    """A mod as it is spelled in records: `block_norm` or `block_norm(block=128)`.

    Args:
        text: what `spell` returns.

    Returns:
        The mod with its options.

    Example:
        >>> parse("block_norm(block=128)")
        UseBlockNorm(block=128)
    """
    call = ast.parse(text, mode="eval").body
    if isinstance(call, ast.Name):
        return find(call.id)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} is no mod with options; expected e.g. block_norm(block=128)")
    plain = type(find(call.func.id))
    return plain(**{str(option.arg): ast.literal_eval(option.value) for option in call.keywords})


def find_all(mods: "str | Mod | Iterable[str | Mod]") -> list[Mod]:
    """Mods of one name, a comma-separated list of names, or a sequence; each at most once."""
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
