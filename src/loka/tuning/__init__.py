"""tuning: `loka.tune` turns a model into a faster one and proves it. To understand the product, read this room.

A *unit* is what is converted as one: a chain of linears with the norms and activations between them, or one linear.
Its *way* is how it runs: as a "chain", under a recipe such as "rowwise", or "high" (not converted).
An *offer* is a unit with a way that the accuracy score allows (`loka.dispatch.choosing`; plans of a report use it too).
The *selection* holds the offers that have passed every check so far.

loop.py         `tune`: check the arguments, run the session, apply its plan
session.py      the phases in order: look, choose, verify, record
call.py         the arguments of one call, and the current selection
task.py         the user's model, batches and loss or step, and how to run them
layout.py       apply rewrites that keep the function, unless they bring a wrong kernel or move the metric
batches.py      keep the first batches of an iterable, and notice those that are no new data
looking.py      find the units, record the magnitudes for their scales, score what each way would do to the loss
timing.py       capture a step as it will run, compiled in a CUDA graph, and time it
fragment.py     cut a unit out of its model, to time it by itself
estimating.py   estimate the speed of a unit on a GPU that is not present, with an error bar
row_fits.py     the same for a linear that runs alone, from rows of the performance database
attempt.py      try what may fail, so that only the unit that fails is left out
rehearsal.py    run one step with the selection; on request, train two copies and compare them
kernels.py      judge every kernel call of a step with the conformance gate, and drop units that run a wrong one
choosing.py     time or estimate every unit, and drop those that are not faster
metric.py       measure the metric with units swapped in, and drop linears until it is within the margin
gradients.py    check the gradients of the kernels against 16-bit gradients and against the reference kernels
whole_step.py   time the whole step against the compiled 16-bit one, and drop units until it is faster
tables.py       choose formats of embedding tables and codecs of collectives within the same margin
comparing.py    compare the metric of two runs on the same held-out batches, paired
evidence.py     save every measurement at once, so that an interrupted call can resume
progress.py     the progress bar
tuned.py        the result
"""

from loka.tuning.estimating import Estimator, estimate_model
from loka.tuning.loop import tune
from loka.tuning.task import Task
from loka.tuning.tuned import Tuned

__all__ = ["Estimator", "Task", "Tuned", "estimate_model", "tune"]
