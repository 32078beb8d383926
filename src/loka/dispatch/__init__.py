"""dispatch: which kernel runs, and why. Recipes, performance database, policy, Plan. Never computes."""

from loka.dispatch.database import Database, Machine, bucket_of
from loka.dispatch.export import export
from loka.dispatch.plan import check, diff, explain, spell
from loka.dispatch.policy import PREFERENCE, Policy, error_of, make_plan, uniform_plan
from loka.dispatch.recipe import MIXTURES, RECIPES, USUAL, Mixture, Operands, Recipe, Rule, mixture_named, recipe_named
from loka.dispatch.tune import TuneResult, jobs_of_report, tune

__all__ = [
    "MIXTURES",
    "PREFERENCE",
    "RECIPES",
    "USUAL",
    "Database",
    "Machine",
    "Mixture",
    "Operands",
    "Policy",
    "Recipe",
    "Rule",
    "TuneResult",
    "bucket_of",
    "check",
    "diff",
    "error_of",
    "explain",
    "export",
    "jobs_of_report",
    "make_plan",
    "mixture_named",
    "recipe_named",
    "spell",
    "tune",
    "uniform_plan",
]
