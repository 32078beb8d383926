"""comms: encoded communication between ranks. Codecs, collectives for FSDP2, DDP and TorchRec, and one common plan."""

from loka.comms.agreement import Agreement, RankError
from loka.comms.collectives import Part, Wire, all_gather, all_reduce, reduce_scatter
from loka.comms.fsdp import StepClock, quantize_ddp, quantize_fsdp
from loka.kernels.wire.codec import Codec, parse_codec

__all__ = [
    "Agreement", "Codec", "Part", "RankError", "StepClock", "Wire", "all_gather", "all_reduce", "parse_codec",
    "quantize_ddp", "quantize_fsdp", "reduce_scatter",
]  # fmt: skip
