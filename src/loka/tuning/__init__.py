"""tuning: one call from a model to a faster model with proof. Read it top to bottom and you have seen the product.

loop.py         the call: check what was given, run the session, apply its plan
session.py      the loop: look, choose, verify
task.py         what the user gave: a model, batches, a loss or a step; how they are run
looking.py      the units of the model, the magnitudes their scales come from, what each way would do to the loss
timing.py       a unit and the whole step as they will run: compiled, in a CUDA graph
estimating.py   how fast a unit would be on a GPU that is not here, with an error bar
verifying.py    the whole model beside high precision: the metric on held-out batches, paired
evidence.py     everything measured, on disk as soon as it is known, so that a call that was cut short goes on
tuned.py        the result

Which way of a unit the score lets through is decided in loka.dispatch.choosing, for plans of a report too.
"""

from loka.tuning.estimating import Estimator, estimate_model
from loka.tuning.loop import tune
from loka.tuning.task import Task
from loka.tuning.tuned import Tuned

__all__ = ["Estimator", "Task", "Tuned", "estimate_model", "tune"]
