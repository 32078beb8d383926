"""records: what rooms write down. Frozen structs to JSON and back, strictly. No torch, so that a report can be made anywhere."""

from loka.records.measurement import Environment, Interval
from loka.records.plan import Choice, Plan, SitePlan
from loka.records.probe import (
    GEMMS,
    Candidate,
    Gemm,
    GemmVerdict,
    ProbeReport,
    Role,
    Safety,
    Site,
    Speed,
    TensorStats,
)
from loka.records.record import (
    Part,
    Record,
    RecordError,
    append,
    from_json,
    load,
    read_lines,
    save,
    save_lines,
    to_json,
    write_atomically,
)
from loka.records.run import Comparison, Outcome, Point, Run

__all__ = [
    "GEMMS",
    "Candidate",
    "Choice",
    "Comparison",
    "Environment",
    "Gemm",
    "GemmVerdict",
    "Interval",
    "Outcome",
    "Part",
    "Plan",
    "Point",
    "ProbeReport",
    "Record",
    "RecordError",
    "Role",
    "Run",
    "Safety",
    "Site",
    "SitePlan",
    "Speed",
    "TensorStats",
    "append",
    "from_json",
    "load",
    "read_lines",
    "save",
    "save_lines",
    "to_json",
    "write_atomically",
]
