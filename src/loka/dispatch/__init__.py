"""dispatch: which kernel runs, and why. Recipes, policy, Plan. Never computes."""

from loka.dispatch.recipe import RECIPES, Operands, Recipe, recipe_named

__all__ = ["RECIPES", "Operands", "Recipe", "recipe_named"]
