"""lowp: the modules a plan places, with autograd: linears and whole chains in low precision, their scales, their weights, and the Guard that watches them."""

from loka.lowp.chain import Chain, Part, chain_of, chains_of
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.guard import Guard, GuardConfig
from loka.lowp.linear import Linear

__all__ = ["Chain", "ChainPrecision", "Guard", "GuardConfig", "Linear", "Link", "Part", "chain_of", "chains_of"]
