"""Estimate the time of a linear that runs alone under a recipe, GEMM by GEMM, from rows of the performance database.

Rows include quantization, with which nothing is fused, so the estimate is rather too slow. The times of one variant on
one backend are fitted by non-negative coefficients of a constant, the work, the waves of tiles and the bytes
(`_features`), with the least relative error. The spread is leave-one-shape-out: every K x N is predicted from others.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from loka.dispatch.rows import LINEAR, shipped
from loka.records.performance import PerformanceRow

Array = NDArray[np.float64]
LEAST = 8  # measurements needed for a fit


@dataclass(frozen=True)
class RowFit:
    """A model of the times of one variant on one backend.

    Args:
        gemm: which of the three GEMMs of a linear.
        high: coefficients of the time in bf16.
        low: coefficients of the time in FP8.
        spread: log error of the ratio of both that nine of ten rows stay within.
    """

    gemm: str
    high: Array
    low: Array
    spread: float

    def microseconds(self, m: int, k: int, n: int) -> tuple[float, float]:
        """Return the modelled microseconds in bf16 and in FP8."""
        x = _features(self.gemm, m, k, n)
        return float(x @ self.high), float(x @ self.low)


def _features(gemm: str, m: int, k: int, n: int) -> Array:
    rows, inner, columns = {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}[gemm]
    waves = math.ceil(math.ceil(rows / 128) * math.ceil(columns / 128) / 132)
    return np.array(
        [
            1.0,
            2e-12 * rows * inner * columns,
            2e-12 * waves * inner * 128 * 128 * 132,
            1e-6 * (rows + columns) * inner,
            1e-6 * rows * inner,
            1e-6 * rows * columns,
        ]
    )


def _solve_nonnegative(x: Array, t: Array) -> Array:
    """Fit by least squares of the relative error, removing the most negative term until none is negative."""
    scaled, active = x / t[:, None], list(range(x.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, active], np.ones(len(t)), rcond=None)[0]
        if (found >= 0).all():
            break
        active.pop(int(np.argmin(found)))
    out = np.zeros(x.shape[1])
    out[active] = found
    return out


@cache
def fit_rows(target: str, variant: str, backend: str) -> RowFit | None:
    """Fit the rows of a variant (`loka.dispatch.rows.linear_variant`) that were measured on a device with a backend.

    None if there are too few.
    """
    rows = [row for row in _rows_of(target) if row.variant == variant and row.backend == backend]
    if len(rows) < LEAST:
        return None
    gemm = variant.split()[0]
    x = np.stack([_features(gemm, row.m, row.k, row.n) for row in rows])
    times = [np.array([getattr(row, side).value for row in rows]) for side in ("baseline", "microseconds")]
    shapes = np.array([f"{row.k}x{row.n}" for row in rows])
    errors = []
    for shape in np.unique(shapes):
        out = shapes == shape
        high, low = (x[out] @ _solve_nonnegative(x[~out], t[~out]) for t in times)
        errors.append(np.log(high / low) - np.log(times[0][out] / times[1][out]))
    spread = float(np.quantile(np.abs(np.concatenate(errors)), 0.9))
    return RowFit(gemm, _solve_nonnegative(x, times[0]), _solve_nonnegative(x, times[1]), spread)


@cache
def _rows_of(target: str) -> list[PerformanceRow]:
    """Return the rows of aligned linears that have a bf16 time. A misaligned bf16 GEMM would be an unfair baseline."""
    return [
        row
        for _, record in shipped()
        for group in record.groups
        if group.origin.device == target
        for row in group.rows
        if row.op == LINEAR and row.microseconds and row.baseline and row.k % 16 == 0 and row.n % 16 == 0
    ]
