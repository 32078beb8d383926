"""Caches of what calls of ops launch and allocate: plans, see `loka.kernels.triton_bound`."""

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, TypeVar

PLANS = 1024  # entries of a cache: shapes of a model, times the batch sizes it is called with
R = TypeVar("R")
_caches: "list[_lru_cache_wrapper[Any]]" = []


def planned(function: Callable[..., R]) -> "_lru_cache_wrapper[R]":
    """Cache a function of numbers that returns a plan."""
    cached = lru_cache(maxsize=PLANS)(function)
    _caches.append(cached)
    return cached


def forget_plans() -> None:
    """Forget every plan: those made from now on allocate as torch's deterministic mode says now (`strides.maker`)."""
    for cached in _caches:
        cached.cache_clear()
