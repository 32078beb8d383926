"""Distributions of weights and activations: statistics per layer, and a verdict per model."""

from typing import Literal

from loka.records.measurement import Environment
from loka.records.record import Part, Record

Likeness = Literal["LLM-like", "ranker-like", "between", "untrained"]  # the last: no verdict


class GroupRange(Part, frozen=True):
    """The range inside groups that share a scale under one Spec: range hurts a scaled format, size does not."""

    spec: str
    crest_bits: float  # log2(absmax / rms) of a group, 99th percentile over groups
    underflow: float  # share of non-zero elements that become zero


class LayerStats(Part, frozen=True):
    """One weight, or the activations that enter one layer."""

    name: str
    kind: Literal["weight", "activation"]
    shape: list[int]
    elements: int  # number sampled
    variance: float
    absmax: float
    abs_p99: float
    kurtosis: float  # excess; 0 for a Gaussian
    groups: list[GroupRange]


class ModelStats(Part, frozen=True):
    """One model: its layers, and what kind of model their distributions resemble."""

    name: str
    source: str
    activations_of: str | None  # what was run through it; None: weights only
    layers: list[LayerStats]
    likeness: Likeness
    reasons: list[str]


class Reference(Part, frozen=True):
    """A published value that is drawn as a line; not measured here."""

    label: str
    statistic: Literal["variance", "absmax"]
    value: float


class Analysis(Record, frozen=True, tag="analysis"):
    """The distributions of several models, side by side."""

    models: list[ModelStats]
    references: list[Reference]
    environment: Environment
