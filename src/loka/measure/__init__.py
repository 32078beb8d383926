"""measure: the truth about kernels. Conformance to the law, timing, isolation, the machine. Everything that measures a kernel goes through here."""

from loka.measure.conformance import Conformance
from loka.measure.device import snapshot
from loka.measure.gate import judge_backend, judge_quantizer
from loka.measure.timing import Contender, RedKernelError, time_together

__all__ = [
    "Conformance",
    "Contender",
    "RedKernelError",
    "judge_backend",
    "judge_quantizer",
    "snapshot",
    "time_together",
]
