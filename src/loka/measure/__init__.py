"""measure: the truth about kernels. Conformance to the law, timing, isolation, the machine. Everything that measures a kernel goes through here."""

from loka.measure.conformance import Conformance, check_quantized, check_scaled_mm, judge, law, tolerance
from loka.measure.device import peaks, snapshot
from loka.measure.gate import judge_backend, judge_quantizer
from loka.measure.isolation import Outcome, map_isolated, run_isolated
from loka.measure.timing import Candidate, RedKernelError, Timing, time_together

__all__ = [
    "Candidate",
    "Conformance",
    "Outcome",
    "RedKernelError",
    "Timing",
    "check_quantized",
    "check_scaled_mm",
    "judge",
    "judge_backend",
    "judge_quantizer",
    "law",
    "map_isolated",
    "peaks",
    "run_isolated",
    "snapshot",
    "time_together",
    "tolerance",
]
