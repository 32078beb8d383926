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
from loka.nn.embedding import EmbeddingTables, pad_recent
from loka.nn.mix import DotInteraction, FactorizationMachine, FeatureMix, compute_dtype
from loka.nn.norm import BLOCK, EPS, BlockNorm, LayerNorm, NormKind, RMSNorm, make_norm, rms_normalize
from loka.nn.tower import MLP, Layer, Style, make_head

__all__ = [
    "BLOCK",
    "EPS",
    "MLP",
    "ActivationKind",
    "BlockNorm",
    "DotInteraction",
    "EmbeddingTables",
    "FactorizationMachine",
    "FeatureMix",
    "GateKind",
    "HardSigmoid",
    "HardSwish",
    "Layer",
    "LayerNorm",
    "NormKind",
    "RMSNorm",
    "Sigmoid",
    "Style",
    "compute_dtype",
    "gate_for",
    "make_activation",
    "make_gate",
    "make_head",
    "make_norm",
    "pad_recent",
    "rms_normalize",
]
