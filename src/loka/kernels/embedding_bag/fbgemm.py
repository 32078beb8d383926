"""FBGEMM's table lookup for inference, on float32 and float16 rows, without copying them.

`auto` never picks it: the last bits of results would depend on whether it is installed. FBGEMM's 8-bit and 4-bit rows
have a 16-bit scale and shift inside the row, ours a scale of one byte beside the rows, so they would have to be copied.
`loka.nn.quantized_collection` goes the other way and converts TorchRec's rows to ours.
"""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no, require_library
from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.embedding_bag.rows import Rows

_MODULE = "fbgemm_gpu"
_TYPES = {"float32": 0, "float16": 1}
_OUT = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
_HOST = 3
_POOLING = {"sum": 0, "mean": 1}


def supports(call: BagCall, device: torch.device) -> Verdict:
    """Accept float32 and float16 rows on the CPU."""
    if call.kind not in _TYPES:
        return no(f"reads float32 and float16 rows; those of {call.kind} would have to be copied")
    if call.hot:
        return no("does not support tables with some rows kept in float32")
    if call.out_dtype not in _OUT:
        return no(f"writes float32, float16 and bfloat16, not {call.out_dtype}")
    if device.type != "cpu":
        return no("runs on the CPU only: its GPU kernels have not been verified here")
    return require_library(_MODULE, "torchrec")


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `loka.kernels.embedding_bag.embedding_bag`. Without offsets, every item is a bag of one."""
    import fbgemm_gpu  # noqa: F401  registers the operators

    starts = torch.arange(len(indices) + 1) if offsets is None else offsets
    width, kind = rows.width, _TYPES[rows.kind]
    data = rows.data.contiguous().view(torch.uint8).view(-1)
    result: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        dev_weights=data,
        uvm_weights=data.new_empty(0),
        weights_placements=torch.tensor([_HOST], dtype=torch.int32),
        weights_offsets=torch.zeros(1, dtype=torch.int64),
        weights_tys=torch.tensor([kind], dtype=torch.uint8),
        D_offsets=torch.tensor([0, width], dtype=torch.int32),
        total_D=width,
        max_int2_D=0,
        max_int4_D=0,
        max_int8_D=0,
        max_float16_D=width if kind == 1 else 0,
        max_float32_D=width if kind == 0 else 0,
        indices=indices.to(torch.int32),
        offsets=starts.to(torch.int32),
        pooling_mode=_POOLING["sum" if mode == "item" else mode],
        indice_weights=None if weights is None else weights.float(),
        output_dtype=_OUT[out_dtype],
        row_alignment=1,
    )
    return result
