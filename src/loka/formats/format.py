"""Number formats: which values they have, and how a float32 is rounded to them.

A floating format with e exponent bits, m mantissa bits and bias b holds the values

    (-1)^s * 2^(E - b) * (1 + M / 2^m)        normal,    E >= 1
    (-1)^s * 2^(1 - b) * (M / 2^m)            subnormal, E == 0

so the distance between neighbours around x, the quantum, is 2^(max(floor(log2 |x|), 1 - b) - m), and rounding is
`round(x / quantum) * quantum`, which is exact in float32 because the quantum is a power of two. Integers have a quantum
of 1 and are symmetric (-127..127, -7..7): -128 has no counterpart and would bias a symmetric tensor.

Special values are treated the same in every kernel of this library:

* finite values beyond the largest saturate to it; they never become Inf or NaN;
* non-finite values stay visible: NaN stays NaN, Inf stays Inf in E5M2 and becomes NaN in E4M3, which has no Inf.
  Formats without NaN cannot hold them in the data; `quantize` sets the scale of their block to NaN instead.

Formats that torch has a dtype for are stored in it; the others are emulated, with one unpacked code per byte.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Format:
    """A number format, compared and printed by name.

    Args:
        name: e4m3, e5m2, ...
        exponent_bits: 0 for an integer format.
        mantissa_bits: explicit ones, without the leading 1.
        bias: of the exponent.
        dtype: that `encode` returns.
        has_nan: whether it has NaN.
        has_inf: whether it has infinity.

    Example:
        >>> FORMATS["e4m3"].max
        448.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    dtype: torch.dtype
    has_nan: bool
    has_inf: bool

    def __eq__(self, other: object) -> bool:  # by name only: torch.compile would trace the comparison of every field
        return isinstance(other, Format) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def max(self) -> float:
        """Return the largest finite magnitude.

        Literals, because torch.compile(dynamic=True) makes a variable of every number that it finds in an object or a
        module, and fails if two autograd functions read the same one.
        """
        return {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}[self.name]

    @property
    def is_integer(self) -> bool:
        """Return True if the grid is uniform."""
        return self.exponent_bits == 0

    @property
    def smallest_subnormal(self) -> float:
        """Return the smallest positive value; values up to half of it underflow to zero."""
        return 1.0 if self.is_integer else 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Return the magnitude below which relative precision degrades."""
        return 1.0 if self.is_integer else 2.0 ** (1 - self.bias)

    @property
    def bits(self) -> int:
        """Return the bits per element in a packed layout."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", 4, 3, 7, torch.float8_e4m3fn, has_nan=True, has_inf=False)
E5M2 = Format("e5m2", 5, 2, 15, torch.float8_e5m2, has_nan=True, has_inf=True)
E2M1 = Format("e2m1", 2, 1, 1, torch.uint8, has_nan=False, has_inf=False)
INT8 = Format("int8", 0, 7, 0, torch.int8, has_nan=False, has_inf=False)
INT4 = Format("int4", 0, 3, 0, torch.int8, has_nan=False, has_inf=False)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E2M1, INT8, INT4)}

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code & 7; bit 3 is the sign


def _quantum(magnitude: Tensor, format: Format) -> Tensor:
    """Return the spacing of the format's grid around each magnitude (finite, float32)."""
    if format.is_integer:
        return torch.ones_like(magnitude)
    exponent = torch.frexp(magnitude).exponent - 1  # floor(log2), also for float32 subnormals
    return power_of_two(exponent.clamp(min=1 - format.bias) - format.mantissa_bits)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, for -126 <= exponent <= 127. Exact on every device, unlike torch.ldexp's pow."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def round_to(
    x: Tensor,
    format: Format,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Round float32 values to the format's grid, saturating.

    `nearest` rounds ties to even. `stochastic` rounds up with a probability equal to the distance from the lower
    neighbour in quanta, to within 2^-24: the expectation is exact inside the range, and values on the grid are kept.

    Args:
        x: float32.
        format: the grid.
        rounding: nearest or stochastic.
        generator: of the random numbers for stochastic rounding.
        noise: uniform in [0, 1), instead of `generator`, if the numbers must not depend on the order of calls
            (`loka.formats.philox`).

    Returns:
        float32.

    Example:
        >>> round_to(torch.tensor([1.03]), FORMATS["e4m3"])
        tensor([1.])
    """
    _require_float32(x, "round_to")
    magnitude = x.abs()
    finite = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    quantum = _quantum(finite, format)
    steps = finite / quantum
    if rounding == "stochastic":
        if noise is None:
            noise = torch.rand(steps.shape, dtype=torch.float32, device=x.device, generator=generator)
        # not floor(steps + noise): rounding of that sum would move values that are on the grid
        lower = torch.floor(steps)
        steps = lower + (noise < steps - lower).float()
    elif rounding == "nearest":
        steps = torch.round(steps)
    else:
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    rounded = torch.copysign((steps * quantum).clamp(max=format.max), x)
    return torch.where(magnitude.isfinite(), rounded, _non_finite(x, format))


def _require_float32(x: Tensor, function: str) -> None:
    """Refuse other dtypes: a conversion to float32 here would be a second rounding."""
    if x.dtype != torch.float32:
        raise ValueError(f"{function} takes float32, got {x.dtype}; hint: x.float()")


def _non_finite(x: Tensor, format: Format) -> Tensor:
    """Return what NaN and Inf become: themselves if the format has Inf, else NaN."""
    return x if format.has_inf else torch.full_like(x, torch.nan)


def encode(
    x: Tensor,
    format: Format,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Round float32 values and store them in the format's dtype.

    In a format without NaN, non-finite values are stored as zero; the caller must set their scale to NaN, as `quantize`
    does.

    Args:
        x: float32.
        format: of the elements.
        rounding: nearest or stochastic.
        generator: as for `round_to`.
        noise: as for `round_to`.

    Returns:
        The elements.

    Example:
        >>> encode(torch.tensor([1.0]), FORMATS["e4m3"]).dtype
        torch.float8_e4m3fn
    """
    _require_float32(x, "encode")
    if format in (E4M3, E5M2) and rounding == "nearest":  # torch's cast gives the same bits, faster
        clamped = x.clamp(-format.max, format.max)  # clamp keeps NaN
        return torch.where(x.abs() == torch.inf, _non_finite(x, format), clamped).to(format.dtype)
    values = round_to(x, format, rounding=rounding, generator=generator, noise=noise)
    if format.has_nan:
        return values.to(format.dtype)
    values = values.nan_to_num(nan=0.0)
    if format.is_integer:
        return values.to(format.dtype)
    table = torch.tensor(_E2M1_MAGNITUDES, device=x.device)
    return (torch.searchsorted(table, values.abs().contiguous()) + 8 * values.signbit()).to(format.dtype)


def decode(data: Tensor, format: Format) -> Tensor:
    """Convert stored elements to float32. Only the low four bits of an E2M1 byte are used.

    Args:
        data: as returned by `encode`.
        format: its format.

    Returns:
        The values.

    Example:
        >>> decode(encode(torch.tensor([1.0]), FORMATS["e4m3"]), FORMATS["e4m3"])
        tensor([1.])
    """
    if data.dtype != format.dtype:
        raise ValueError(f"{format} is stored as {format.dtype}, got {data.dtype}")
    if format == E2M1:  # not `is`: a Spec may have been pickled or deep-copied
        table = torch.tensor(_E2M1_MAGNITUDES, device=data.device)
        code = data.long()
        return torch.where((code & 8) != 0, -table[code & 7], table[code & 7])
    return data.float()
