"""What an analysis of distributions saw: per layer the size and the shape of weights and activations, per model a verdict."""

from typing import Literal

from loka.records.measurement import Environment
from loka.records.record import Part, Record

Likeness = Literal["LLM-like", "ranker-like", "between", "untrained"]  # the last: no verdict


class GroupRange(Part, frozen=True):
    """What happens inside the groups that share a scale under one Spec: range is what hurts a scaled format, not size."""

    spec: str
    crest_bits: float  # log2(absmax / rms) of a group, 99th percentile over groups
    underflow: float  # share of non-zero elements that become zero


class LayerStats(Part, frozen=True):
    """One weight, or the activations that enter one layer."""

    name: str
    kind: Literal["weight", "activation"]
    shape: list[int]
    elements: int  # looked at
    variance: float
    absmax: float
    abs_p99: float
    kurtosis: float  # excess; 0 for a Gaussian
    groups: list[GroupRange]


class ModelStats(Part, frozen=True):
    """One model: its layers, and what they resemble."""

    name: str
    source: str
    activations_of: str | None  # what was run through it; None: weights only
    layers: list[LayerStats]
    likeness: Likeness
    reasons: list[str]


class Reference(Part, frozen=True):
    """A published value, drawn as a line and measured by nobody here."""

    label: str
    statistic: Literal["variance", "absmax"]
    value: float


class Analysis(Record, frozen=True, tag="analysis"):
    """The distributions of several models, side by side."""

    models: list[ModelStats]
    references: list[Reference]
    environment: Environment
