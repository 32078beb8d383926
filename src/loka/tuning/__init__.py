"""tuning: one call from a model to a faster model with proof. Read it top to bottom and you have seen the product.

loop.py         the call: check what was given, run the session, apply its plan
session.py      the loop, phase by phase: look, choose, verify, record
call.py         what was asked, and what is chosen so far
task.py         what the user gave: a model, batches, a loss or a step; how they are run
looking.py      the units of the model, the magnitudes their scales come from, what each way would do to the loss
timing.py       a unit and the whole step as they will run: compiled, in a CUDA graph
estimating.py   how fast a unit would be on a GPU that is not here, with an error bar
choosing.py     units timed or estimated, and dropped where they are not faster
rehearsal.py    one step of training with everything in it, and a paired run of training where asked for
metric.py       the metric with units swapped in; linears leave until it is within the margin
gradients.py    whether what the kernels return in backward is a gradient: beside 16 bits, and beside the reference
whole_step.py   the whole step beside compiled 16 bits; units leave until it is faster
tables.py       formats of embedding tables and codecs of collectives, under the same margin
comparing.py    the metric of two runs on the same held-out batches, paired
evidence.py     everything measured, on disk as soon as it is known, so that a call that was cut short goes on
tuned.py        the result

Which way of a unit the score lets through is decided in loka.dispatch.choosing, for plans of a report too.
"""

from loka.tuning.estimating import Estimator, estimate_model
from loka.tuning.loop import tune
from loka.tuning.task import Task
from loka.tuning.tuned import Tuned

__all__ = ["Estimator", "Task", "Tuned", "estimate_model", "tune"]
