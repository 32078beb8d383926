"""lowp: the modules a plan places, with autograd: linears and whole chains in low precision, their scales, their weights, and the Guard that watches them."""

from loka.lowp.fused_interaction import FusedInteraction, refuse_interaction
from loka.lowp.fused_projection import FusedProjection
from loka.lowp.fused_tower import FusedTower, freeze
from loka.lowp.guard import Guard, GuardConfig
from loka.lowp.linear import Linear
from loka.lowp.tower_function import Link, TowerPrecision

__all__ = [
    "FusedInteraction",
    "FusedProjection",
    "FusedTower",
    "Guard",
    "GuardConfig",
    "Linear",
    "Link",
    "TowerPrecision",
    "freeze",
    "refuse_interaction",
]
