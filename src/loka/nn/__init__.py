"""Building blocks that the models share and that mods and convert swap, each a named module with a plain state_dict."""

from loka.nn.activation import (
    ActivationKind,
    GateKind,
    HardSigmoid,
    HardSwish,
    Sigmoid,
    gate_for,
    make_activation,
    make_gate,
)
from loka.nn.attention import (
    DotProductAttention,
    SelfAttention,
    check_heads,
    merge_heads,
    rotate,
    split_heads,
)
from loka.nn.embedding import EmbeddingTables, Seeds, pad_recent
from loka.nn.experts import MixtureOfExperts, SwiGLU
from loka.nn.grouped import GroupedLinear, grouped_linear
from loka.nn.mix import DotInteraction, FactorizationMachine, FeatureMix, compute_dtype, multiply_transposed
from loka.nn.norm import BLOCK, EPS, BlockNorm, LayerNorm, NormKind, RMSNorm, make_norm, rms_normalize
from loka.nn.tower import MLP, Layer, Style, make_head

__all__ = [
    "BLOCK",
    "EPS",
    "MLP",
    "ActivationKind",
    "BlockNorm",
    "DotInteraction",
    "DotProductAttention",
    "EmbeddingTables",
    "FactorizationMachine",
    "FeatureMix",
    "GateKind",
    "GroupedLinear",
    "HardSigmoid",
    "HardSwish",
    "Layer",
    "LayerNorm",
    "MixtureOfExperts",
    "NormKind",
    "RMSNorm",
    "Seeds",
    "SelfAttention",
    "Sigmoid",
    "Style",
    "SwiGLU",
    "check_heads",
    "compute_dtype",
    "gate_for",
    "grouped_linear",
    "make_activation",
    "make_gate",
    "make_head",
    "make_norm",
    "merge_heads",
    "multiply_transposed",
    "pad_recent",
    "rms_normalize",
    "rotate",
    "split_heads",
]
