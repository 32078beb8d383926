"""What a plan's parts refuse."""

import math

import pytest

from loka.records import SitePlan


def test_a_site_cannot_be_more_than_the_whole() -> None:
    for share in (-0.1, 5.0, math.nan):
        with pytest.raises(ValueError, match=r"head: flops_share is .*, expected a share from 0 to 1"):
            SitePlan("head", 1, 1, 1, share, [])
