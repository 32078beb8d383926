"""An independent implementation of the formats: every code point from its definition, rounding by comparison with midpoints.

Nothing of loka is imported. Values are float64, in which every code point, every midpoint of two code points and every float32 is exact, so
there is nothing to argue about.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Table:
    """The non-negative finite values of a format; the index of a value is its code without the sign."""

    values: np.ndarray
    sign_bit: int | None  # None: codes are signed integers

    @property
    def max(self) -> float:
        return float(self.values[-1])

    def nearest(self, x: np.ndarray) -> np.ndarray:
        """Codes of finite values: nearest, ties to the even code, saturating."""
        return self._signed(self._index(np.abs(x.astype(np.float64))), np.signbit(x))

    def _index(self, magnitude: np.ndarray) -> np.ndarray:
        upper = np.clip(np.searchsorted(self.values, magnitude), 1, len(self.values) - 1)
        lower = upper - 1
        middle = (self.values[lower] + self.values[upper]) / 2
        even = np.where(lower % 2 == 0, lower, upper)
        return np.where(magnitude > middle, upper, np.where(magnitude < middle, lower, even))

    def _signed(self, index: np.ndarray, negative: np.ndarray) -> np.ndarray:
        if self.sign_bit is None:
            return np.where(negative, -index, index)
        return np.where(negative, index | self.sign_bit, index)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values of codes that `nearest` returns."""
        codes = codes.astype(np.int64)
        negative = codes < 0 if self.sign_bit is None else (codes & self.sign_bit) != 0
        index = np.abs(codes) if self.sign_bit is None else codes & (self.sign_bit - 1)
        return np.where(negative, -1.0, 1.0) * self.values[index]

    def neighbours(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values on either side of x, equal where x is one of them; beyond the largest both are the largest."""
        magnitude = np.minimum(np.abs(x.astype(np.float64)), self.max)
        low = self.values[np.searchsorted(self.values, magnitude, side="right") - 1]
        high = self.values[np.searchsorted(self.values, magnitude, side="left")]
        sign = np.where(np.signbit(x), -1.0, 1.0)
        return np.minimum(sign * low, sign * high), np.maximum(sign * low, sign * high)


def _floating(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> Table:
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, Fraction(code & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
        significand = mantissa if exponent == 0 else 1 + mantissa
        values.append(float(significand * Fraction(2) ** (max(exponent, 1) - bias)))
    return Table(np.array(values), 1 << (exponent_bits + mantissa_bits))


TABLES = {
    "e4m3": _floating(4, 3, 7, 127),  # 0x7f is NaN, there is no Inf
    "e5m2": _floating(5, 2, 15, 124),  # 0x7c is Inf, above it NaN
    "e2m1": _floating(2, 1, 1, 8),
    "int8": Table(np.arange(128.0), None),
    "int4": Table(np.arange(8.0), None),
}


def power_of_two_at_least(amax: float, largest: float) -> int:
    """Smallest k with amax <= largest * 2^k, in exact arithmetic; at least -126, where float32 scales end."""
    k = max(-126, math.frexp(amax)[1] - 1 - math.frexp(largest)[1])  # a lower bound, to start near the answer
    while Fraction(amax) > Fraction(largest) * Fraction(2) ** k:
        k += 1
    return k
