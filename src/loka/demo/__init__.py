"""The whole job on real data: train, tune, train on, compare, report.

    train      a small Wukong on Complete Journey in float32
    tune       `loka.tune` on validation batches: which linears run in FP8, and what that does to the loss of this checkpoint; the plan is saved
    size       on a machine without a GPU: what FP8 is estimated to bring on an H200, for this model and for the wide one; labelled, never measured
    high, control, planned, naive     continuations of the *same* checkpoint (weights, optimiser, position in the data); `planned` converts by the saved plan
    swap       the high-precision run's final weights in FP8, without training on
    compare    per-example log loss on the test split, paired, households resampled
    report     one HTML file from the records

Every station leaves records or a checkpoint below `out`; run again, the job continues after the last finished one, and inside a training
station at its last checkpoint. Other settings than the stored ones start it anew, and it says so.

The continuations anneal the learning rate to zero, so that what a run still jitters by averages out before it is measured: at a constant rate of 2e-3
the same comparison came out as -0.04 % and as +1.7 % from two checkpoints. The control is float32 again, from weights nudged once by a bf16 rounding.
Training is chaotic, so two float32 runs differ too; what the control shows is how much of a difference means nothing. The intervals are over
test examples and do not contain it.

On a CPU the FP8 kernels are emulated: the numerics are those of FP8, the speed is not, and the report calls speed "not measured". On a GPU
(`--device cuda`) tune times every unit and the whole step, and takes what is faster.
"""

from loka.demo.config import DemoConfig
from loka.demo.job import Demo

__all__ = ["Demo", "DemoConfig"]
