"""torch's own embedding_bag and embedding, for float rows: what everybody runs, and the baseline of the others. Sums of 16-bit rows are kept in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.backend import YES, Verdict, no
from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.embedding_bag.rows import FLOATS, Rows


def supports(call: BagCall, device: torch.device) -> Verdict:
    """float32 rows; 16-bit ones item by item, or where the sum may be rounded to their type."""
    if call.kind not in FLOATS:
        return no(f"reads float rows, not {call.kind}")
    if call.hot:
        return no("knows no rows that are kept elsewhere")
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
    """See `reference.run`."""
    if offsets is None:
        return F.embedding(indices, rows.data).to(out_dtype)
    per_sample = None if weights is None else weights.to(rows.data.dtype)
    return F.embedding_bag(
        indices,
        rows.data,
        offsets.to(indices.dtype),
        mode=mode,
        per_sample_weights=per_sample,
        include_last_offset=True,
    )
