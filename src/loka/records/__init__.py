"""records: frozen structs that are strictly validated on the way to JSON and back. Needs no torch."""

from loka.records.ab import BundleInfo, Overlap, PairedMetric, PairedTest, SplitCheck
from loka.records.analysis import Analysis, GroupRange, LayerStats, Likeness, ModelStats, Reference
from loka.records.conversion import Conversion, Quantized, QuantizedSite
from loka.records.measurement import Environment, Interval, capture_environment
from loka.records.mods import ModChange, ModLeft, ModSummary, Recovery
from loka.records.plan import Choice, Plan, SitePlan
from loka.records.probe import (
    GEMMS,
    SOURCES,
    Alarm,
    Candidate,
    Cause,
    DistributionError,
    DriftReport,
    Feature,
    FlopsOf,
    FormatRange,
    Gemm,
    GemmVerdict,
    Move,
    ProbeReport,
    Role,
    Safety,
    Site,
    Source,
    Speed,
    TensorStats,
    Unseen,
    VerdictChange,
)
from loka.records.record import Part, Record, RecordError, from_json, load, replacing, save, to_json, write_atomically
from loka.records.run import Comparison, Point, Progress, Run
from loka.records.serving import Guardrail, LoadBin, LoadTest, OnlineMetric, OnlineTest, RankerColumn, RankerInfo
from loka.records.unit import CollectivePlan, KernelBucket, LinkPlan, Magnitude, TablePlan, UnitEvidence, UnitPlan

__all__ = [
    "GEMMS", "SOURCES", "Alarm", "Analysis", "BundleInfo", "Candidate", "Cause", "Choice", "CollectivePlan",
    "Comparison", "Conversion", "DistributionError", "DriftReport", "Environment", "Feature", "FlopsOf",
    "FormatRange", "Gemm", "GemmVerdict", "GroupRange", "Guardrail", "Interval", "KernelBucket", "LayerStats",
    "Likeness", "LinkPlan", "LoadBin", "LoadTest", "Magnitude", "ModChange", "ModLeft", "ModSummary", "ModelStats",
    "Move", "OnlineMetric", "OnlineTest", "Overlap", "PairedMetric", "PairedTest", "Part", "Plan", "Point",
    "ProbeReport", "Progress", "Quantized", "QuantizedSite", "RankerColumn", "RankerInfo", "Record", "RecordError",
    "Recovery", "Reference", "Role", "Run", "Safety", "Site", "SitePlan", "Source", "Speed", "SplitCheck",
    "TablePlan", "TensorStats", "UnitEvidence", "UnitPlan", "Unseen", "VerdictChange", "capture_environment",
    "from_json", "load", "replacing", "save", "to_json", "write_atomically",
]  # fmt: skip
