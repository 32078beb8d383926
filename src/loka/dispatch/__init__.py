"""dispatch: which kernel runs, and why. Recipes, performance database, policy, chains, Plan. Never computes."""

from loka.dispatch.database import Database, Machine, bucket_of
from loka.dispatch.export import export
from loka.dispatch.plan import check, diff, explain, spell
from loka.dispatch.policy import PREFERENCE, Policy, error_of, make_plan, uniform_plan
from loka.dispatch.recipe import RECIPES, USUAL, Operands, Recipe, recipe_named
from loka.dispatch.tune import TuneResult, jobs_of_report, tune

__all__ = [
    "PREFERENCE",
    "RECIPES",
    "USUAL",
    "Database",
    "Machine",
    "Operands",
    "Policy",
    "Recipe",
    "TuneResult",
    "bucket_of",
    "check",
    "diff",
    "error_of",
    "explain",
    "export",
    "jobs_of_report",
    "make_plan",
    "recipe_named",
    "spell",
    "tune",
    "uniform_plan",
]
