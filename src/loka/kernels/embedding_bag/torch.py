"""torch's own embedding_bag and embedding, for float rows: the baseline. Sums of 16-bit rows are kept in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.backend import YES, Verdict, no
from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.embedding_bag.rows import FLOATS, Rows


def supports(call: BagCall, device: torch.device) -> Verdict:
    """Accept float rows. Pooled rows keep their dtype."""
    if call.kind not in FLOATS:
        return no(f"reads float rows, not {call.kind}")
    if call.hot:
        return no("does not support tables with some rows kept in float32")
    if call.mode != "item" and call.out_dtype != FLOATS[call.kind]:
        return no(f"pools {call.kind} rows into {call.kind}, not {call.out_dtype}")
    return YES


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `loka.kernels.embedding_bag.embedding_bag`."""
    if offsets is None:
        return F.embedding(indices, rows.data).to(out_dtype)
    per_sample = None if weights is None else weights.to(rows.data.dtype)
    starts = offsets.to(indices.dtype)
    return F.embedding_bag(
        indices, rows.data, starts, mode=mode, per_sample_weights=per_sample, include_last_offset=True
    )
