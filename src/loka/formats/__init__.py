"""formats: number formats, Specs, QTensor, quantization and error metrics, in plain torch; bit-exact on any device."""

from loka.formats.error import cosine, left_in_sum, mere, relative_l2, saturated_fraction, sqnr, underflowed_fraction
from loka.formats.format import E2M1, E4M3, E5M2, FORMATS, INT4, INT8, Format, decode, encode, round_to
from loka.formats.philox import Draw, block_bits, round_bf16, uniform_bits
from loka.formats.quantize import (
    SMALLEST_SCALE,
    QTensor,
    block_amax,
    dequantize,
    expand_scale,
    fake_quantize,
    quantize,
    scale_from_amax,
    scale_shape,
)
from loka.formats.spec import COL, ROW, TENSOR, WHOLE, Block, Spec

__all__ = [
    "COL", "E2M1", "E4M3", "E5M2", "FORMATS", "INT4", "INT8", "ROW", "SMALLEST_SCALE", "TENSOR", "WHOLE", "Block",
    "Draw", "Format", "QTensor", "Spec", "block_amax", "block_bits", "cosine", "decode", "dequantize", "encode",
    "expand_scale", "fake_quantize", "left_in_sum", "mere", "quantize", "relative_l2", "round_bf16", "round_to", "saturated_fraction",
    "scale_from_amax", "scale_shape", "sqnr", "underflowed_fraction", "uniform_bits",
]  # fmt: skip
