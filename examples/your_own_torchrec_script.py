"""A TorchRec script with encoded embeddings and one plan for all ranks. The lines marked `loka` were added.

torchrun --nproc-per-node 2 examples/your_own_torchrec_script.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import loka  # loka
from loka import comms  # loka
from loka.comms.planning import plan_together  # loka
from loka.comms.torchrec import INSTALL, make_registry  # loka

try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
except ImportError as error:
    raise SystemExit(f"{error}; install: {INSTALL}") from error

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
tables = [EmbeddingBagConfig(name=n, num_embeddings=500, embedding_dim=32, feature_names=[n]) for n in ("user", "item")]
bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
model: nn.Module = nn.ModuleDict({"bags": bags, "tower": tower})
model.forward = lambda ids: tower(model["bags"](ids).wait().values())
sharders = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=make_registry(wire=(wire := comms.Wire())))]  # loka
parallel = DistributedModelParallel(model, sharders=sharders, device=bags.device)
optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-2)
probe = loka.Probe(parallel, every=1)  # loka
for _ in range(30):
    parts = torch.randint(0, 500, (128,)), torch.ones(128, dtype=torch.int64)
    parallel(KeyedJaggedTensor(["user", "item"], parts[0], lengths=parts[1])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    probe.step()  # loka
plan = plan_together(probe, lambda p: p.evaluate(("rowwise",)).plan(min_speedup=None, recipe="rowwise"))  # loka
print(f"rank {dist.get_rank()}: {loka.convert(parallel, plan)}; {wire.bytes_per_element:.3f} bytes an element")  # loka
