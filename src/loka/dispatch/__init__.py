"""dispatch: decides which kernel runs, and why. Recipes, performance database, policy, plan checks and exports."""

from loka.dispatch.database import Database, Machine, bucket_of
from loka.dispatch.export import export
from loka.dispatch.plan import check
from loka.dispatch.policy import Policy, make_plan
from loka.dispatch.recipe import RECIPES, USUAL, Mixture, Rule, mixture_named, recipe_named, way_of
from loka.dispatch.tune import jobs_of_report, tune

__all__ = [
    "RECIPES", "USUAL", "Database", "Machine", "Mixture", "Policy", "Rule", "bucket_of", "check", "export",
    "jobs_of_report", "make_plan", "mixture_named", "recipe_named", "tune", "way_of",
]  # fmt: skip
