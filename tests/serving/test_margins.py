"""What admission keeps free before a deadline is learned: sending, standstills of the machine, layouts."""

import pytest

from loka.serving import Policy
from loka.serving.margins import DRIFTS, Margins

POLICY = Policy(sla=0.1, reserve=0.002)


def test_before_anything_is_known_the_policy_holds() -> None:
    margins = Margins(POLICY)
    margins.refresh()
    assert (margins.reserve, margins.leaving, margins.drift, margins.layout) == (0.002, 0.001, 0.0, 0.0)
    assert margins.admission == 0.002


def test_sending_and_layouts_are_quantiles() -> None:
    margins = Margins(POLICY)
    for n in range(100):
        margins.learn_sending(0.004 if n < 96 else 0.5)
        margins.learn_layout(0.001 if n % 32 else 0.9)
    margins.refresh()
    assert (margins.reserve, margins.leaving) == pytest.approx((0.005, 0.005))  # and half of the policy's reserve
    assert margins.layout == 0.001
    for _ in range(256):
        margins.learn_sending(0.5)
    margins.refresh()
    assert (margins.reserve, margins.leaving) == pytest.approx((0.025, 0.025))  # a quarter of the SLA at most


def test_drift_is_what_a_request_loses_to_the_batches_before_it() -> None:
    margins = Margins(POLICY)
    now = 0.0
    for n in range(DRIFTS):
        now += 0.005
        margins.learn_batch(now, 0.003 if n % 10 in (0, 1) else -0.0005)  # every tenth and the one behind it
    margins.refresh()
    # Two make 6 ms; over 20 batches of an SLA four do, less what the 16 others gain, 12 - 8; the worst is 6 - 4 + 6
    assert margins.drift == pytest.approx(0.008)
    assert margins.admission == pytest.approx(0.010)
    for _ in range(DRIFTS):
        now += 0.005
        margins.learn_batch(now, -0.0005)
    margins.refresh()
    assert margins.drift == 0.0


def test_a_rare_standstill_is_forgotten_and_a_long_one_does_not_close_the_server() -> None:
    margins = Margins(POLICY)
    for n in range(DRIFTS):
        margins.learn_batch(0.045 * n, 0.016 if n == 200 else 0.0)  # three batches within an SLA
    margins.refresh()
    assert margins.drift == 0.0
    for n in range(DRIFTS, 2 * DRIFTS):
        margins.learn_batch(0.045 * n, 0.5)
    margins.refresh()
    assert margins.admission == pytest.approx(0.025)


def test_memory_is_bounded() -> None:
    margins = Margins(POLICY)
    for n in range(10_000):
        margins.learn_batch(1e-5 * n, 0.001)
        margins.learn_layout(0.001)
        margins.learn_sending(0.001)
    assert max(map(len, (margins._sent, margins._laid, margins._excess, margins._drifts))) <= DRIFTS
