import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.data.history import Past

EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(100, 115), st.integers(0, 9)), min_size=1, max_size=40)
QUERIES = st.lists(st.tuples(st.integers(0, 5), st.integers(95, 120)), min_size=1, max_size=20)


@given(EVENTS, QUERIES)
def test_everything_is_strictly_before(events: list[tuple[int, int, int]], queries: list[tuple[int, int]]) -> None:
    keys, times, values = (np.array(column) for column in zip(*events, strict=True))
    asked, moments = (np.array(column) for column in zip(*queries, strict=True))
    past = Past(keys, times)
    past.add_sum("value", values)
    counts = past.count(asked, moments)
    totals = past.total("value", asked, moments)
    elapsed = past.elapsed(asked, moments, never=-1.0)
    start, length = past.windows(asked, moments, max_length=3)
    for i, (key, moment) in enumerate(queries):
        # sorted() is stable, so simultaneous events keep the order in which they were given
        before = sorted([(t, v) for k, t, v in events if k == key and t < moment], key=lambda event: event[0])
        assert counts[i] == len(before)
        assert totals[i] == sum(v for _, v in before)
        assert elapsed[i] == (moment - before[-1][0] if before else -1.0)
        window = values[past.order[start[i] : start[i] + length[i]]]
        assert window.tolist() == [v for _, v in before[-3:]]


def test_the_future_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    keys, times = rng.integers(0, 9, 500), rng.integers(0, 300, 500)
    cut = times < 150
    full, truncated = Past(keys, times), Past(keys[cut], times[cut])
    asked, moments = rng.integers(0, 9, 200), rng.integers(0, 151, 200)
    assert np.array_equal(full.count(asked, moments), truncated.count(asked, moments))
    assert np.array_equal(full.elapsed(asked, moments, never=-1), truncated.elapsed(asked, moments, never=-1))


def test_ranges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="keys"):
        Past(np.array([-1]), np.array([0]))
    with pytest.raises(ValueError, match="span"):
        Past(np.array([1, 1]), np.array([0, 1 << 33]))


def test_empty_history() -> None:
    past = Past(np.array([], np.int64), np.array([], np.int64))
    assert past.count(np.array([1]), np.array([5])).tolist() == [0]
    assert past.elapsed(np.array([1]), np.array([5]), never=9.0).tolist() == [9.0]
