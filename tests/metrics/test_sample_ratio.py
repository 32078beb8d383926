"""Sample-ratio mismatch against SciPy's chi-square, which scikit-learn brings along."""

import pytest
from scipy.stats import chisquare

from loka.metrics import check_sample_ratio


@pytest.mark.parametrize(
    ("observed", "ratio"),
    [((5000, 5100), (1, 1)), ((9010, 990), (0.9, 0.1)), ((300, 310, 400), (1, 1, 1)), ((10, 20, 30, 40), (1, 2, 3, 4))],
)
def test_matches_scipy(observed: tuple[int, ...], ratio: tuple[float, ...]) -> None:
    result = check_sample_ratio(observed, ratio)
    expected = chisquare(observed, [sum(observed) * part / sum(ratio) for part in ratio])
    assert result.chi_square == pytest.approx(expected.statistic, rel=1e-10, abs=1e-12)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_verdict_and_line() -> None:
    fine, broken = check_sample_ratio((5000, 5050), (1, 1)), check_sample_ratio((5000, 5500), (1, 1))
    assert not fine.mismatch
    assert "no mismatch" in str(fine)
    assert broken.mismatch
    assert "MISMATCH" in str(broken)
    assert "\n" not in str(broken)


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="at least two"):
        check_sample_ratio((5,), (1,))
    with pytest.raises(ValueError, match="not all zero"):
        check_sample_ratio((0, 0), (1, 1))
    with pytest.raises(ValueError, match="positive finite"):
        check_sample_ratio((1, 1), (1, 0))
    with pytest.raises(ValueError, match="threshold"):
        check_sample_ratio((1, 1), (1, 1), threshold=0)
