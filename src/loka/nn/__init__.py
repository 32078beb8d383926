"""nn: building blocks shared by the models, which mods and convert replace.

Each is a module with a plain state_dict.
"""

from loka.nn.activation import HardSigmoid, HardSwish, Sigmoid
from loka.nn.attention import DotProductAttention, SelfAttention
from loka.nn.embedding import EmbeddingTables
from loka.nn.experts import MixtureOfExperts, SwiGLU
from loka.nn.grouped import GroupedLinear
from loka.nn.mix import DotInteraction, FactorizationMachine, FeatureMix
from loka.nn.norm import BLOCK, EPS, BlockNorm, make_norm
from loka.nn.tower import MLP, Style, make_head

__all__ = [
    "BLOCK", "EPS", "MLP", "BlockNorm", "DotInteraction", "DotProductAttention", "EmbeddingTables",
    "FactorizationMachine", "FeatureMix", "GroupedLinear", "HardSigmoid", "HardSwish", "MixtureOfExperts",
    "SelfAttention", "Sigmoid", "Style", "SwiGLU", "make_head", "make_norm",
]  # fmt: skip
