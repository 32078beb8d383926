"""measure: correctness checks and timing of kernels, isolation of crashes, and a description of the machine."""

from loka.measure.conformance import Conformance
from loka.measure.device import snapshot
from loka.measure.gate import judge_backend, judge_quantizer
from loka.measure.timing import Contender, RedKernelError, time_together

__all__ = [
    "Conformance", "Contender", "RedKernelError", "judge_backend", "judge_quantizer", "snapshot", "time_together",
]  # fmt: skip
