"""What training recovered of what mods cost."""

import pytest

from loka.records import Recovery


@pytest.mark.parametrize(("after_mods", "share"), [(0.6, 0.9), (0.5004, None), (0.45, None)])
def test_a_share_of_a_cost_that_is_noise_says_nothing(after_mods: float, share: float | None) -> None:
    found = Recovery(metric="log loss", before=0.5, after_mods=after_mods, after_training=0.51, steps=100).recovered
    assert found == (None if share is None else pytest.approx(share))
