"""What a deadline needs beside the planned times of batches, learned while the server runs.

    layout    the host's time from the moment a batch is handed out until the device has it
    reserve   from the end of a batch to the sending of its answers: a busy machine exceeds any constant
    leaving   the same at its median, for requests that are dropped if they would be late
    drift     how much longer than planned the batches in front of a request take together. A plan of q for each is
              enough as long as slow batches are rare. When the machine stands still, all who wait lose that time:
              drift = max over n of the sum of (took - planned) of the last n batches, of those within one SLA

Each is the policy's quantile of recent values (`leaving`: their median). The reserve and drift together take at most a
share `MOST` of the SLA: beyond that the machine is overloaded, and shedding more does not help.
"""

import math
from collections import deque
from collections.abc import Iterable

from loka.serving.queues import Policy

SENT = 256  # recent answers whose sending time is kept
LAID = 64  # recent batches whose layout time is kept
DRIFTS = 256  # recent batches whose drift is kept
MOST = 0.25
MEDIAN = 0.5


class Margins:
    """Learned times around the batches of one engine.

    Args:
        policy: the SLA, the least reserve and the quantile.

    Example:
        >>> margins = Margins(Policy(sla=0.05, reserve=0.002))
        >>> margins.learn_sending(0.004)
        >>> margins.refresh()
        >>> margins.reserve
        0.005
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.reserve, self.leaving, self.drift, self.layout = policy.reserve, policy.reserve / 2, 0.0, 0.0
        self._sent: deque[float] = deque(maxlen=SENT)
        self._laid: deque[float] = deque(maxlen=LAID)
        self._excess: deque[tuple[float, float]] = deque(maxlen=DRIFTS)
        self._drifts: deque[float] = deque(maxlen=DRIFTS)

    @property
    def admission(self) -> float:
        """The seconds before its deadline at which the batch of a newcomer must end."""
        return max(self.reserve, min(self.reserve + self.drift, MOST * self._policy.sla))

    def learn_sending(self, seconds: float) -> None:
        """Record how long after its batch an answer was sent."""
        self._sent.append(seconds)

    def learn_layout(self, seconds: float) -> None:
        """Record how long it took to lay a batch out."""
        self._laid.append(seconds)

    def learn_batch(self, ended: float, excess: float) -> None:
        """Record that a batch took `excess` seconds longer than planned, or shorter."""
        self._excess.append((ended, excess))
        while self._excess[0][0] < ended - self._policy.sla:
            self._excess.popleft()
        total = worst = 0.0
        for _, more in reversed(self._excess):
            total += more
            worst = max(worst, total)
        self._drifts.append(worst)

    def refresh(self) -> None:
        """Compute the margins from what was recorded."""
        policy = self._policy
        if self._sent:
            most, rest = MOST * policy.sla, policy.reserve / 2
            self.reserve = max(policy.reserve, min(_quantile(self._sent, policy.quantile) + rest, most))
            self.leaving = min(_quantile(self._sent, MEDIAN) + rest, most)
        if self._laid:
            self.layout = _quantile(self._laid, policy.quantile)
        if self._drifts:
            self.drift = _quantile(self._drifts, policy.quantile)


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(q * len(ordered)) - 1]
