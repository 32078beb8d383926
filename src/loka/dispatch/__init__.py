"""dispatch: which kernel runs, and why. Recipes, policy, Plan. Never computes."""

from loka.dispatch.plan import check, diff, explain, spell
from loka.dispatch.policy import PREFERENCE, Policy, error_of, make_plan, uniform_plan
from loka.dispatch.recipe import RECIPES, Operands, Recipe, recipe_named

__all__ = [
    "PREFERENCE",
    "RECIPES",
    "Operands",
    "Policy",
    "Recipe",
    "check",
    "diff",
    "error_of",
    "explain",
    "make_plan",
    "recipe_named",
    "spell",
    "uniform_plan",
]
