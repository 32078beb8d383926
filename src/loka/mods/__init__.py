"""mods: reversible rewrites of any nn.Module that make more of it safe and fast in low precision.

    import loka
    applied = loka.mods.apply(model, ["no_bias", "block_norm", "hard_swish"], example=x)
    print(applied)                          # what changed where, what was left unchanged and why
    loka.mods.revert(model)                 # restore the original modules; parameters keep their trained values

Every change states its effect on the function: exact, up to rounding, or an architecture change that needs training.
"""

from loka.mods.align_shapes import AlignShapes
from loka.mods.block_norm import UseBlockNorm
from loka.mods.feature_layout import FeatureLayout
from loka.mods.fuse import Fuse
from loka.mods.hard_swish import UseHardSwish
from loka.mods.mod import Mod, spell
from loka.mods.no_bias import NoBias
from loka.mods.norm_order import NormOrder
from loka.mods.protect_intermediates import ProtectIntermediates, is_protected, unprotected
from loka.mods.protect_residual import ProtectResidual
from loka.mods.registry import CORE, FREE, find, names, parse
from loka.mods.rewriting import Applied, applied_to, apply, revert
from loka.mods.state import adapt_state_dict, load_checkpoint, load_state_dict
from loka.mods.suggestion import Suggestion, suggest, unjudged
from loka.units.example import Example, capture_example

__all__ = [
    "CORE", "FREE", "AlignShapes", "Applied", "Example", "FeatureLayout", "Fuse", "Mod", "NoBias", "NormOrder",
    "ProtectIntermediates", "ProtectResidual", "Suggestion", "UseBlockNorm", "UseHardSwish", "adapt_state_dict",
    "applied_to", "apply", "capture_example", "find", "is_protected", "load_checkpoint", "load_state_dict", "names",
    "parse", "revert", "spell", "suggest", "unjudged", "unprotected",
]  # fmt: skip
