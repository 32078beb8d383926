"""lowp: the differentiable low-precision modules that a plan places: linears, chains of linears, their scales and
weights, and the Guard that monitors them."""

from loka.lowp.chain import Chain, Part, chain_of, chains_of
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.guard import Guard, GuardConfig
from loka.lowp.linear import Linear

__all__ = ["Chain", "ChainPrecision", "Guard", "GuardConfig", "Linear", "Link", "Part", "chain_of", "chains_of"]
