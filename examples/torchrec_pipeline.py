"""Tune a TorchRec model inside `TrainPipelineBase`: dense linears in FP8, tables unchanged.

    python examples/torchrec_pipeline.py        uses a GPU if there is one; pip install 'loka[torchrec]'

The pipeline runs forward, backward and the optimizer step, so tune is called between two calls of `progress`, on the wrapped model.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loka.comms.torchrec import INSTALL
from loka.integrations import TuneDuringTraining

try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.train_pipeline import TrainPipelineBase
    from torchrec.streamable import Pipelineable
except ImportError as error:
    raise SystemExit(f"{error}; install: {INSTALL}") from error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS, WIDTH, ROWS = ["user", "item"], 64, 256
torch.manual_seed(0)


class Batch(Pipelineable):
    """A batch that the pipeline can move to the device."""

    def __init__(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.dense, self.sparse, self.labels = dense, sparse, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in (self.dense, self.sparse, self.labels)))

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return Batch(*(part.pin_memory() for part in (self.dense, self.sparse, self.labels)))


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=f"t_{key}", embedding_dim=WIDTH, num_embeddings=1000, feature_names=[key]) for key in KEYS]  # fmt: skip
        self.sparse = EmbeddingBagCollection(tables=tables, device=DEVICE)
        self.top = nn.Sequential(nn.Linear(WIDTH * 3, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))  # fmt: skip

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([batch.dense, self.sparse(batch.sparse).values()], 1)
        logits = self.top(x).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def make(rows: int = ROWS) -> Batch:
    dense = torch.randn(rows, WIDTH)
    sparse = KeyedJaggedTensor(KEYS, torch.randint(1000, (rows * len(KEYS),)), lengths=torch.ones(rows * len(KEYS), dtype=torch.int64))  # fmt: skip
    return Batch(dense, sparse, (dense.sum(1) > 0).float())


def stream(count: int) -> Iterator[Batch]:
    return (make() for _ in range(count))


model = Ranker().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
pipeline = TrainPipelineBase(model, optimizer, DEVICE)
held_out = [make().to(DEVICE) for _ in range(8)]
tuning = TuneDuringTraining(held_out, after=40, step=lambda m, batch: m(batch)[0], out=tempfile.mkdtemp(), margin=0.02, progress=False)  # fmt: skip
batches = stream(60)
for _ in range(60):
    tuning.begin_step(model)
    try:
        pipeline.progress(batches)  # forward, backward, step; copies the next batch at the same time
    except StopIteration:
        break
    tuned = tuning.end_step(model)
    if tuned is not None:
        print(tuned)
print(f"loss {float(model(held_out[0])[0].detach()):.4f}")
