"""serving: answers inside a deadline, over HTTP."""

from loka.serving.scheduler import Batch, Entry, Policy, Scheduler, Shed
from loka.serving.times import BatchTimes

__all__ = ["Batch", "BatchTimes", "Entry", "Policy", "Scheduler", "Shed"]
