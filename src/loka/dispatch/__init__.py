"""dispatch: decides which kernel runs, and why. It measures nothing about a model and changes none.

recipe.py          what a named recipe quantizes each GEMM to; mixtures, which assign recipes to sites by name
policy.py          what a plan must fulfil, and the choice for one GEMM
making.py          `make_plan`: a plan from the report of a probe
chains.py          the chains of such a plan
choosing.py        offers: which units may run how, by the predicted change of the loss; `loka.tune` uses them too
margin.py          what counts as no change of the loss
budget.py          the fastest sites whose measured effects together stay within a bound
plan.py            check whether a plan fits a model
speed.py           times of candidates: measured by Probe, or from the database
database.py        the performance database; store.py is its SQLite file, rows.py its keys and rows
tune.py            measure missing rows on this machine
export.py          plans as configurations of other tools; export_torchao.py of torchao
"""

from loka.dispatch.database import Database, Machine, bucket_of
from loka.dispatch.export import export
from loka.dispatch.making import make_plan
from loka.dispatch.plan import check
from loka.dispatch.policy import Policy
from loka.dispatch.recipe import RECIPES, USUAL, Mixture, Rule, mixture_named, recipe_named, way_of
from loka.dispatch.tune import jobs_of_report, tune

__all__ = [
    "RECIPES", "USUAL", "Database", "Machine", "Mixture", "Policy", "Rule", "bucket_of", "check", "export",
    "jobs_of_report", "make_plan", "mixture_named", "recipe_named", "tune", "way_of",
]  # fmt: skip
