"""Triton lookup: many rows in flight, sums in float32. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.formats import E4M3, INT4, INT8
from loka.kernels.backend import Verdict, no
from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.embedding_bag.rows import FLOATS, Rows
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_runs_on

WIDEST = 2048
_READ = (E4M3.name, INT8.name, INT4.name)


def supports(call: BagCall, device: torch.device) -> Verdict:
    """Accept float, int8, E4M3 and int4 rows up to 2,048 wide."""
    # compare names: torch 2.11 cannot trace the construction of a Spec
    if call.kind not in FLOATS and call.kind.partition(":")[0] not in _READ:
        return no(f"reads float, int8, e4m3 and int4 rows, not {call.kind}")
    if not 1 <= call.width <= WIDEST:
        return no(f"holds a row in registers: up to {WIDEST} wide, not {call.width}")
    if call.out_dtype not in FLOATS.values():
        return no(f"writes float32, bf16 and fp16, not {call.out_dtype}")
    return triton_runs_on(device)


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `loka.kernels.embedding_bag.embedding_bag`. An index out of range gives NaN."""
    from loka.kernels.embedding_bag import triton_ops

    result: Tensor = invoke(
        triton_ops.embedding_bag,
        rows.data, rows.scale_code, rows.slot, rows.hot, indices.contiguous(), None if offsets is None else offsets.contiguous(),
        None if weights is None else weights.contiguous(), mode == "mean", str(rows.spec or ""), out_dtype,
    )  # fmt: skip
    return result
