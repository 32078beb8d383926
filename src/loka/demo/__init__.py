"""demo: the whole workflow on real data: train, tune, continue training, compare, report.

    train      train a small Wukong on Complete Journey in float32
    tune       run `loka.tune` on validation batches: which linears run in FP8, and how that changes this checkpoint's
               loss; the plan is saved
    size       without a GPU: estimate what FP8 would gain on an H200, for this model and for the wide one
    high, control, planned, naive
               continue the *same* checkpoint (weights, optimizer, position in the data); `planned` converts by the plan
    swap       convert the final weights of the high-precision run to FP8, without further training
    compare    compare per-example log loss on the test split, paired, resampling households
    report     write one HTML file from the records

Every station leaves records or a checkpoint in `out`. A second run continues after the last finished station, and
inside a training station at its last checkpoint. If the settings differ from the stored ones, it says so and restarts.

The continuations anneal the learning rate to zero, so that the remaining jitter of a run averages out before it is
measured: at a constant rate of 2e-3 the same comparison came out as -0.04 % and as +1.7 % from two checkpoints. The
control is float32 again, from weights nudged once by a bf16 rounding. Training is chaotic, so two float32 runs differ
too, and the control shows how large a meaningless difference is. The intervals are over test examples and do not
include it.

On a CPU the FP8 kernels are emulated: the numerics are those of FP8, the speed is not, and the report calls speed "not
measured". On a GPU (`--device cuda`) tune times every unit and the whole step, and converts what is faster.
"""

from loka.demo.config import DemoConfig
from loka.demo.job import Demo

__all__ = ["Demo", "DemoConfig"]
