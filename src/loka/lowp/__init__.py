"""lowp: the differentiable low-precision modules that a plan places: linears, chains of linears, their scales and
weights, and the Guard that monitors them.

A linear:
linear.py            `Linear`: an nn.Linear whose three GEMMs each run in their own precision
linear_function.py   its autograd function; linear_state.py what it remembers besides its parameters
binding.py           what each GEMM runs; auto.py resolves the backend `auto` on a device
weight_cache.py      the quantized weight until it changes; witness.py notices changes that no counter shows

A chain of linears (start with chain_function.py, which has the maths):
chain.py             `Chain`: placed in a model, split and released. It inherits, bottom up, from
                     chain_scales.py, chain_weights.py, chain_running.py (execution) and chain_handing.py
chain_function.py    links, precision and tensors; chain_forward.py and chain_backward.py call the kernels;
                     chain_node.py is the autograd node
chain_modules.py     how the modules of a chain behave while it is placed; chain_handing.py and passing.py check that a
                     forward calls them in the order in which the chain was found
chain_parts.py       the modules of each link; folding.py folds a batch norm into its linear
chain_trace.py       the operands of every link, computed again for observers
interaction.py       a whole Wukong layer around a chain
shared_inputs.py     one quantized copy of what several chains read; origins.py how an input was made

Both:
scaling.py           scales from earlier steps or a calibration; step.py what happens after an optimizer step
guard.py, health.py  monitor a running model, and return sites that fail to high precision
leaving.py           errors for exporters and dtypes that are not supported; fast_path.py torch's fused encoder layer
"""

from loka.lowp.chain import Chain, Part, chain_of, chains_of
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.guard import Guard, GuardConfig
from loka.lowp.linear import Linear

__all__ = ["Chain", "ChainPrecision", "Guard", "GuardConfig", "Linear", "Link", "Part", "chain_of", "chains_of"]
