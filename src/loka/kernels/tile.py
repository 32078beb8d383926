"""Building blocks of our Triton kernels: rounding, scales, activations, dropout, tile order.

They implement `loka.formats` bit for bit on a tile in registers:

    scale = max(amax / format_max, 2^-126), 1 where amax is 0            amax over the finite elements only
    q     = cast(x * (1 / scale)),  saturating; non-finite x stays visible (NaN, or Inf in E5M2)

Triton's `/` is an approximate division, so scales are divided with a correction. The hardware cast rounds to nearest
even and saturates, which would hide an Inf, hence the explicit select. Triton's CPU interpreter truncates instead. So
under the interpreter (PREROUND), and for stochastic rounding, values are first rounded onto the FP8 grid with integer
arithmetic, and the cast is then exact.
"""

import triton
import triton.language as tl

from loka.formats.philox import ROUNDS
from loka.kernels.dropout import FIRST, SECOND, STRIDE

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)
_ROUNDS, _STRIDE, _FIRST, _SECOND = (
    tl.constexpr(ROUNDS),
    tl.constexpr(STRIDE),
    tl.constexpr(FIRST),
    tl.constexpr(SECOND),
)


@triton.jit
def finite_magnitude(x):
    """Return |x| with 0 in place of NaN and Inf, as an amax needs it."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def larger(a, b):
    """Return the maximum, propagating NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr, PREROUND: tl.constexpr):
    """Return max |x| along an axis, NaN if there is one.

    It takes one instruction per element and equals the amax if it is finite. A tile whose maximum is finite can skip
    every check for special values, which lets a quantizer run at the speed of a copy. The interpreter has no fast path
    and runs custom reductions element by element, so it takes the amax over finite values instead.
    """
    if PREROUND:
        return tl.max(finite_magnitude(x), AXIS)
    else:
        return tl.reduce(tl.abs(x), AXIS, larger)


@triton.jit
def divided(x, DIVISOR: tl.constexpr):
    """Return x / DIVISOR, correctly rounded, in three instructions.

    It multiplies by the rounded reciprocal and corrects once by the exact remainder. An exact division takes a dozen
    instructions and would cost a fused quantizer half its speed. The interpreter's fma rounds twice, so it divides.
    """
    divisor = tl.zeros_like(x) + DIVISOR
    if _INTERPRETED:
        return tl.div_rn(x, divisor)
    else:
        quotient = x * (1.0 / DIVISOR)
        return tl.fma(tl.fma(-quotient, divisor, x), tl.zeros_like(x) + (1.0 / DIVISOR), quotient)


@triton.jit
def scale_of(amax, E5M2: tl.constexpr, POW2: tl.constexpr):
    """Return the scale of a block (the dequantization multiplier) from its amax."""
    quotient = divided(amax, 57344.0) if E5M2 else divided(amax, 448.0)
    scale = tl.maximum(quotient, 1.1754943508222875e-38)
    if POW2:  # round up: add all mantissa bits, then clear them
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def power_of_two_scale(amax, E5M2: tl.constexpr):
    """Return `scale_of(amax, E5M2, True)` and its reciprocal without a division; 1 where amax is NaN.

    The largest values are 1.75 x 2^8 and 1.75 x 2^15: the scale is the exponent of amax less 8 or 15, plus one where the
    mantissa exceeds 1.75, and at least 2^-126.
    """
    EXPONENT: tl.constexpr = (15 if E5M2 else 8) << 23
    bits = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    bits = tl.where(amax > 0, tl.maximum(bits, EXPONENT + 0x800000) - EXPONENT, 0x3F800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """Return 1 / scale, correctly rounded and never infinite."""
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if _INTERPRETED:
        return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def widened(x):
    """Convert a loaded tile to float32.

    int8 goes four bytes at a time through fp16: the biased byte becomes the low mantissa bits of 1024, then 1152 is
    subtracted. This is exact and runs at the full rate; the byte conversion instruction runs at a quarter of it.
    """
    if x.dtype == tl.int8:
        if _INTERPRETED:
            return x.to(tl.float32)
        else:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 flipped, low, high, middle;
                .reg .b16 a, b, c, d;
                xor.b32 flipped, $4, 0x80808080;
                prmt.b32 low, flipped, 0x64646464, 0x5140;
                prmt.b32 high, flipped, 0x64646464, 0x7362;
                mov.b32 middle, 0x64806480;
                sub.rn.f16x2 low, low, middle;
                sub.rn.f16x2 high, high, middle;
                mov.b32 {a, b}, low;
                mov.b32 {c, d}, high;
                cvt.f32.f16 $0, a;
                cvt.f32.f16 $1, b;
                cvt.f32.f16 $2, c;
                cvt.f32.f16 $3, d;
                }
                """,
                "=f,=f,=f,=f,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
    else:
        return x.to(tl.float32)


@triton.jit
def _round_to_grid(magnitude, noise, E5M2: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round finite magnitudes onto the FP8 grid. `noise` is 32 random bits for stochastic rounding."""
    DROPPED: tl.constexpr = 21 if E5M2 else 20  # mantissa bits that float32 has beyond FP8
    SUBNORMAL: tl.constexpr = 6.103515625e-05 if E5M2 else 0.015625  # smallest normal
    STEPS: tl.constexpr = 65536.0 if E5M2 else 512.0  # 1 / smallest subnormal
    bits = magnitude.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        random = noise & ((1 << DROPPED) - 1)
        normal = (bits + random) >> DROPPED << DROPPED
        fraction = random.to(tl.float32) * (1.0 / (1 << DROPPED))
        small = tl.floor(magnitude * STEPS + fraction) / STEPS
    else:
        half = (1 << (DROPPED - 1)) - 1
        normal = (bits + half + ((bits >> DROPPED) & 1)) >> DROPPED << DROPPED
        MAGIC: tl.constexpr = 8388608.0 / STEPS  # adding it leaves a spacing of one subnormal step
        small = (magnitude + MAGIC) - MAGIC
    return tl.where(magnitude < SUBNORMAL, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def to_fp8(
    x, inv, noise, E5M2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr, BOUNDED: tl.constexpr = False
):
    """Quantize x with the inverse scale, already broadcast. BOUNDED asserts that x has no Inf, as after a norm."""
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    y = x * inv
    if STOCHASTIC or PREROUND:
        finite = tl.abs(x) < float("inf")
        magnitude = tl.minimum(tl.abs(tl.where(finite, y, 0.0)), LARGEST)
        magnitude = tl.minimum(_round_to_grid(magnitude, noise, E5M2, STOCHASTIC), LARGEST)
        y = tl.where(finite, tl.where(y < 0, -magnitude, magnitude), float("nan"))
    elif not BOUNDED:
        # The cast keeps NaN but would saturate Inf. Inf * 0 is NaN; a finite x only adds a zero of its own sign.
        y = tl.fma(x, inv, x * 0.0)
    if E5M2:
        q = y.to(tl.float8e5)
        if BOUNDED:
            return q
        else:
            sign = tl.where(x < 0, 0x80, 0).to(tl.uint8)
            infinite = tl.abs(x) == float("inf")
            return tl.where(infinite, sign | 0x7C, q.to(tl.uint8, bitcast=True)).to(tl.float8e5, bitcast=True)
    elif PREROUND:  # the interpreter would cast NaN to 384
        bits = tl.where(y == y, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F)
        return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return y.to(tl.float8e4nv)


@triton.jit
def nan_for_inf(x):
    """Replace Inf by NaN: E4M3 has no Inf, and the cast would saturate it. One instruction, since Inf x 0 is NaN."""
    return tl.fma(x, tl.zeros_like(x), x)


@triton.jit
def pack_rows(y0, y1, y2, y3):
    """Cast four scaled float32 tiles to E4M3 and pack them into words: byte i of each word comes from tile i.

    Two conversions and a move for four elements; the cast saturates and keeps NaN. Written in PTX for speed, and
    because Triton 3.6 was seen to store wrong bytes when one FP8 tensor is used in two layouts (NOTES.md, 2026-11-15).
    """
    return tl.inline_asm_elementwise(
        ("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, " "$3; mov.b32 $0, {low, high}; }"),
        "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pack_rows_checked(
    x0, x1, x2, x3, inv, n0, n1, n2, n3, E5M2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr
):
    """Like `pack_rows`, for unscaled tiles that may hold special values or are rounded stochastically."""
    b0 = to_fp8(x0, inv, n0, E5M2, STOCHASTIC, PREROUND).to(tl.uint8, bitcast=True).to(tl.uint32)
    b1 = to_fp8(x1, inv, n1, E5M2, STOCHASTIC, PREROUND).to(tl.uint8, bitcast=True).to(tl.uint32)
    b2 = to_fp8(x2, inv, n2, E5M2, STOCHASTIC, PREROUND).to(tl.uint8, bitcast=True).to(tl.uint32)
    b3 = to_fp8(x3, inv, n3, E5M2, STOCHASTIC, PREROUND).to(tl.uint8, bitcast=True).to(tl.uint32)
    return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.int32, bitcast=True)


@triton.jit
def _reciprocal(x, PREROUND: tl.constexpr):
    if PREROUND:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sigmoid(z, PREROUND: tl.constexpr):
    """Return 1 / (1 + e^-z). Triton's own sigmoid divides exactly, which costs more than the rest of a norm."""
    return _reciprocal(1.0 + tl.exp2(z * -1.4426950408889634), PREROUND)


@triton.jit
def tanh(z, PREROUND: tl.constexpr):
    """Return 2 sigmoid(2z) - 1, or its series near zero, where the difference would lose every digit."""
    return tl.where(tl.abs(z) < 0.02, z * (1.0 - z * z * (1.0 / 3.0)), 2.0 * sigmoid(2.0 * z, PREROUND) - 1.0)


@triton.jit
def _normal_tail(z, PREROUND: tl.constexpr):
    """Return (P(X > |z|), e^(-z^2 / 2)) for a standard normal X.

    Uses a rational approximation of erfc with an absolute error of 1e-7 (Abramowitz and Stegun 7.1.26): a dozen
    instructions, two of them special functions. The library's erf takes three times that, most of the epilogue of a
    GELU layer. The exponential is also the density that the derivative needs.
    """
    t = _reciprocal(1.0 + 0.23164189 * tl.abs(z), PREROUND)
    bell = tl.exp2(z * z * -0.7213475204444817)
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return series * bell, bell


@triton.jit
def _gelu_exponent(z):
    """Return v = 2 sqrt(2 / pi) (z + 0.044715 z^3), so that gelu_tanh(z) = z sigmoid(v)."""
    return z * (1.5957691216057308 + 0.07135481282636447 * z * z)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, PREROUND: tl.constexpr, SLOPE: tl.constexpr = 0.01):
    """Apply the activation with this index in `loka.kernels.activation.ACTIVATIONS`. NaN stays NaN."""
    if ACTIVATION == 1:
        return larger(z, 0.0)
    elif ACTIVATION == 2:
        return z * sigmoid(z, PREROUND)
    elif ACTIVATION == 3:
        return z * (tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0))
    elif ACTIVATION == 4:
        tail, _ = _normal_tail(z, PREROUND)
        return z * tl.where(z > 0.0, 1.0 - tail, tail)
    elif ACTIVATION == 5:
        return z * sigmoid(_gelu_exponent(z), PREROUND)
    elif ACTIVATION == 6:
        return tanh(z, PREROUND)
    elif ACTIVATION == 7:
        return sigmoid(z, PREROUND)
    elif ACTIVATION == 8:
        return tl.where(z > 0.0, z, z * SLOPE)
    else:
        return z


@triton.jit
def activation_slope(z, ACTIVATION: tl.constexpr, PREROUND: tl.constexpr, SLOPE: tl.constexpr = 0.01):
    """d activate(z) / dz. Like torch: relu'(0) = hard_swish'(-3) = 0, hard_swish'(3) = 1, leaky_relu'(0) = SLOPE."""
    if ACTIVATION == 1:
        return tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == 2:
        s = sigmoid(z, PREROUND)
        return s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == 3:
        return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z * (1.0 / 3.0) + 0.5, 1.0))
    elif ACTIVATION == 4:
        tail, bell = _normal_tail(z, PREROUND)
        return tl.where(z > 0.0, 1.0 - tail, tail) + z * bell * 0.3989422804014327
    elif ACTIVATION == 5:
        s = sigmoid(_gelu_exponent(z), PREROUND)
        return s * (1.0 + z * (1.0 - s) * (1.5957691216057308 + 0.2140644384790934 * z * z))
    elif ACTIVATION == 6 or ACTIVATION == 7:
        return slope_from_output(activate(z, ACTIVATION, PREROUND, SLOPE), ACTIVATION)
    elif ACTIVATION == 8:
        return tl.where(z > 0.0, 1.0, SLOPE)
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def slope_from_output(y, ACTIVATION: tl.constexpr):
    """Return the derivative of tanh or sigmoid from the activation's output y."""
    if ACTIVATION == 6:
        return 1.0 - y * y
    else:
        return y * (1.0 - y)


@triton.jit
def drawn(seed, row, column, stream, threshold, factor):
    """Return a tile of dropout multipliers: `factor` where an element is kept, 0 where it is dropped.

    Draws as `loka.kernels.dropout` defines: row and column are indices into the whole matrix, threshold is
    `threshold_of(p)`.
    """
    zero = tl.zeros(row.shape, tl.uint32)
    k0, k1, _, _ = tl.philox(seed, zero + row.to(tl.uint32), zero + stream.to(tl.uint32), zero, zero, _ROUNDS)
    wide = (k0[:, None] + (column.to(tl.uint32) * _STRIDE)[None, :]).to(tl.uint64) * _FIRST
    h = ((wide >> 32).to(tl.uint32) ^ wide.to(tl.uint32) ^ k1[:, None]) * _SECOND
    return tl.where(h.to(tl.int32, bitcast=True) >= threshold, tl.zeros(h.shape, tl.float32) + factor, 0.0)


@triton.jit
def tile_order(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (tile_m, tile_n) of a tile index, in groups of GROUP_M rows so that neighbors share operands in L2."""
    per_group = GROUP_M * num_n
    first = (tile // per_group) * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def multiply(a, b, PREROUND: tl.constexpr):
    """Return the float32 product of two 16-bit blocks."""
    if PREROUND:  # the interpreter would multiply the bit patterns of bf16 values
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)
