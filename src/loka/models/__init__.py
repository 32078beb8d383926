"""models: recommendation models, one file per paper. They run in high precision on one device, and every heavy product
is a module of its own."""

from loka.models.cost import count
from loka.models.ranker import Core, Ranker
from loka.models.registry import build, build_ranker, configure, names, sizes

__all__ = ["Core", "Ranker", "build", "build_ranker", "configure", "count", "names", "sizes"]
