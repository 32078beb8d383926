"""Recommendation models, one file per paper: single device, high precision, every heavy product a named child module."""

from loka.models.cost import count
from loka.models.ranker import Core, Ranker
from loka.models.registry import build, build_ranker, configure, names, sizes

__all__ = ["Core", "Ranker", "build", "build_ranker", "configure", "count", "names", "sizes"]
