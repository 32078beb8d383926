"""TransformerEngine: listed so that the answer to "why not?" is on record.

Its GEMM entry (`transformer_engine.pytorch.cpp_extensions.general_gemm`) multiplies its own tensor classes, made by its own quantisers, and calls
cuBLASLt underneath: the kernels of our `torch` backend. There is nothing of its own to call on (data, scale) pairs, so this backend refuses, and prepares
no weights.
"""

from typing import NoReturn

import torch

from loka.formats import QTensor
from loka.kernels.backend import UnsupportedError, Verdict, no
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import fp8_gpu, library

_REASON = "its GEMM is cuBLASLt behind its own tensor classes, the same kernels as the torch backend: use that"


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Never; first for want of a GPU or the library, then for want of a kernel of its own."""
    gpu = fp8_gpu(device)
    if not gpu:
        return gpu
    present = library("transformer_engine.pytorch", "transformer-engine")
    return no(_REASON) if present else present


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> NoReturn:
    """Raise: `supports` never says yes."""
    raise UnsupportedError(f"transformer_engine cannot run scaled_mm: {_REASON}")
