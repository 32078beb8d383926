"""Further models for benchmarks/zoo.py, written from their papers as users write them: nothing in them knows of this package, and their styles differ on purpose.

    python benchmarks/zoo.py --models deepfm,mmoe --modes infer,train --ways bf16,bf16+max,torchao-rowwise,loka --out more.json

    deepfm       ids, factorisation machine beside an nn.Sequential with dropout (input of 1677: no multiple of 16)
    xdeepfm      compressed interaction network by einsum and Conv1d, functional deep part in a ModuleList
    pnn          inner and outer products of fields, then an MLP with functional activations
    mmoe, ple    experts in ModuleLists that read one input, softmax gates, einsum; PLE stacks two extraction layers
    din          attention unit over [q, k, q-k, q*k] with Dice, then an MLP with PReLU
    dcnmix       DCN-V2, low-rank mixture of experts in parameters and einsum, beside a deep part
    dcnlow       DCN-V2, low-rank cross layers out of two linears, stacked before a deep part
    gdcn         gated cross layers: two linears that read one input, sigmoid of the one times the other
    autoint      self-attention over fields: query, key, value and residual as linears of their own
    masknet      mask blocks: LayerNorm(x) * MLP(x), parallel
    finalmlp     two gated streams of Linear, BatchNorm, ReLU, dropout; a bilinear head
    twotower     Linear, BatchNorm, ReLU towers and in-batch softmax: B x B logits
    resmlp       x + mlp(norm(x)), GELU, then a gated fusion of two inputs
    llama        causal pre-norm transformer over ids: RMSNorm, fused qkv, SwiGLU
    bst          nn.TransformerEncoder as it comes: post-norm, ReLU, dropout 0.1

`make(name, device, generator, tiny=True)` gives each in a size for a CPU.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 1000  # ids of a field: small, so that a step is about the dense part


class DeepFM(nn.Module):
    def __init__(self, fields=26, dense=13, dim=64, hidden=(2048, 2048, 1024), dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(fields * VOCABULARY, dim)
        self.first = nn.Embedding(fields * VOCABULARY, 1)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.first.weight, std=0.1)
        self.register_buffer("offsets", torch.arange(fields) * VOCABULARY)
        layers, width = [], fields * dim + dense
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        layers.append(nn.Linear(width, 1))
        self.dnn = nn.Sequential(*layers)
        self.linear = nn.Linear(dense, 1)

    def forward(self, ids, dense):
        ids = ids + self.offsets
        e = self.embedding(ids)
        first = self.first(ids).sum(1) + self.linear(dense)
        second = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1, keepdim=True)
        return first + second + self.dnn(torch.cat([e.flatten(1), dense], dim=1))


class CIN(nn.Module):
    def __init__(self, fields, layers):
        super().__init__()
        sizes = [fields, *layers]
        self.convs = nn.ModuleList(nn.Conv1d(fields * a, b, 1) for a, b in itertools.pairwise(sizes))

    def forward(self, x0):
        x, pooled = x0, []
        for conv in self.convs:
            z = torch.einsum("bfd,bhd->bfhd", x0, x).flatten(1, 2)
            x = F.relu(conv(z))
            pooled.append(x.sum(-1))
        return torch.cat(pooled, dim=1)


class XDeepFM(nn.Module):
    def __init__(self, fields=26, dim=64, cin=(32, 32), hidden=(2048, 2048, 2048)):
        super().__init__()
        self.cin = CIN(fields, cin)
        sizes = [fields * dim, *hidden]
        self.deep = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(sizes[-1] + sum(cin), 1)

    def forward(self, x):
        h = x.flatten(1)
        for layer in self.deep:
            h = F.relu(layer(h))
        return self.out(torch.cat([self.cin(x), h], 1))


class PNN(nn.Module):
    def __init__(self, fields=32, dim=64, h1=2048, h2=1024):
        super().__init__()
        row, col = torch.triu_indices(fields, fields, 1)
        self.register_buffer("row", row)
        self.register_buffer("col", col)
        self.l1 = nn.Linear(fields * dim + fields * (fields - 1) // 2 + dim * dim, h1)
        self.l2 = nn.Linear(h1, h2)
        self.l3 = nn.Linear(h2, h2)
        self.out = nn.Linear(h2, 1)

    def forward(self, x):
        b = x.shape[0]
        inner = (x[:, self.row] * x[:, self.col]).sum(-1)
        pooled = x.sum(1)
        outer = (pooled.unsqueeze(2) * pooled.unsqueeze(1)).reshape(b, -1)
        z = torch.cat((x.reshape(b, -1), inner, outer), dim=-1)
        z = F.leaky_relu(self.l1(z))
        z = F.leaky_relu(self.l2(z))
        z = F.leaky_relu(self.l3(z))
        return self.out(z)


def expert(width, hidden, out):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out), nn.ReLU())


class MMoE(nn.Module):
    def __init__(self, width=1536, hidden=1024, out=512, experts=6, tasks=2):
        super().__init__()
        self.experts = nn.ModuleList([expert(width, hidden, out) for _ in range(experts)])
        self.gates = nn.ModuleList([nn.Linear(width, experts, bias=False) for _ in range(tasks)])
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(out, out // 2), nn.ReLU(), nn.Linear(out // 2, 1)) for _ in range(tasks)]
        )

    def forward(self, x):
        e = torch.stack([expert(x) for expert in self.experts], dim=1)
        outputs = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            g = torch.softmax(gate(x), dim=-1)
            outputs.append(tower(torch.einsum("be,bed->bd", g.to(e.dtype), e)))
        return torch.cat(outputs, dim=1)


class Extraction(nn.Module):
    """One layer of progressive extraction: experts of each task and shared ones, a gate for each output."""

    def __init__(self, width, hidden, out, tasks, own, shared, last):
        super().__init__()
        self.own = nn.ModuleList(nn.ModuleList(expert(width, hidden, out) for _ in range(own)) for _ in range(tasks))
        self.shared = nn.ModuleList(expert(width, hidden, out) for _ in range(shared))
        self.gates = nn.ModuleList(nn.Linear(width, own + shared) for _ in range(tasks))
        self.shared_gate = None if last else nn.Linear(width, tasks * own + shared)

    def forward(self, xs):
        own = [[e(x) for e in experts] for experts, x in zip(self.own, xs[:-1], strict=True)]
        shared = [e(xs[-1]) for e in self.shared]
        mixed = []
        for gate, experts, x in zip(self.gates, own, xs[:-1], strict=True):
            g = F.softmax(gate(x), dim=1).unsqueeze(1)
            mixed.append(torch.bmm(g.to(x.dtype), torch.stack(experts + shared, 1)).squeeze(1))
        if self.shared_gate is not None:
            every = torch.stack([e for experts in own for e in experts] + shared, 1)
            g = F.softmax(self.shared_gate(xs[-1]), dim=1).unsqueeze(1)
            mixed.append(torch.bmm(g.to(every.dtype), every).squeeze(1))
        return mixed


class PLE(nn.Module):
    def __init__(self, width=1024, hidden=1024, out=1024, tasks=2, own=2, shared=2):
        super().__init__()
        self.tasks = tasks
        self.layers = nn.ModuleList(
            [
                Extraction(width, hidden, out, tasks, own, shared, last=False),
                Extraction(out, hidden, out, tasks, own, shared, last=True),
            ]
        )
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(out, 256), nn.ReLU(), nn.Linear(256, 1)) for _ in range(tasks))  # fmt: skip

    def forward(self, x):
        xs = [x] * (self.tasks + 1)
        for layer in self.layers:
            xs = layer(xs)
        return torch.cat([tower(x) for tower, x in zip(self.towers, xs, strict=True)], 1)


class Dice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        p = torch.sigmoid(self.bn(x.reshape(-1, x.shape[-1]))).view_as(x)
        return p * x + (1 - p) * self.alpha * x


class AttentionUnit(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.dice1 = nn.Linear(4 * dim, hidden[0]), Dice(hidden[0])
        self.fc2, self.dice2 = nn.Linear(hidden[0], hidden[1]), Dice(hidden[1])
        self.fc3 = nn.Linear(hidden[1], 1)

    def forward(self, query, keys, mask):
        q = query.unsqueeze(1).expand_as(keys)
        h = torch.cat([q, keys, q - keys, q * keys], dim=-1)
        h = self.dice1(self.fc1(h))
        h = self.dice2(self.fc2(h))
        score = self.fc3(h).squeeze(-1).masked_fill(~mask, 0.0)
        return torch.einsum("bt,btd->bd", score, keys)


class DIN(nn.Module):
    def __init__(self, dim=128, profile=256, attention=(512, 256), hidden=(1024, 512)):
        super().__init__()
        self.attention = AttentionUnit(dim, attention)
        width = profile + 3 * dim
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden[0]),
            nn.PReLU(),
            nn.Linear(hidden[0], hidden[1]),
            nn.PReLU(),
            nn.Linear(hidden[1], 1),
        )

    def forward(self, profile, target, history, lengths):
        mask = torch.arange(history.shape[1], device=history.device)[None] < lengths[:, None]
        interest = self.attention(target, history, mask).to(target.dtype)
        return self.mlp(torch.cat([profile, target, interest, target * interest], 1))


class LowRankMixture(nn.Module):
    def __init__(self, width, rank, experts):
        super().__init__()
        self.u = nn.Parameter(torch.randn(experts, width, rank) / rank**0.5)
        self.v = nn.Parameter(torch.randn(experts, width, rank) / width**0.5)
        self.c = nn.Parameter(torch.randn(experts, rank, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts)

    def forward(self, x0, x):
        h = torch.tanh(torch.einsum("bi,eir->ber", x, self.v))
        h = torch.tanh(torch.einsum("ber,ers->bes", h, self.c))
        h = torch.einsum("bes,eis->bei", h, self.u) + self.bias
        g = self.gate(x).softmax(-1)
        return torch.einsum("bei,be->bi", x0.unsqueeze(1) * h, g) + x


class DCNMix(nn.Module):
    def __init__(self, width=2048, rank=256, experts=4, layers=2, hidden=(2048, 1024)):
        super().__init__()
        self.cross = nn.ModuleList([LowRankMixture(width, rank, experts) for _ in range(layers)])
        self.deep = nn.Sequential(nn.Linear(width, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], hidden[1]), nn.ReLU())
        self.head = nn.Linear(width + hidden[1], 1)

    def forward(self, x):
        h = x
        for layer in self.cross:
            h = layer(x, h)
        return self.head(torch.cat([h, self.deep(x)], dim=-1))


class DCNLow(nn.Module):
    def __init__(self, width=3072, rank=768, layers=3, hidden=(2048, 1024, 512)):
        super().__init__()
        self.v = nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in range(layers)])
        self.u = nn.ModuleList([nn.Linear(rank, width) for _ in range(layers)])
        deep, size = [], width
        for h in hidden:
            deep += [nn.Linear(size, h), nn.ReLU(inplace=True)]
            size = h
        self.deep = nn.Sequential(*deep)
        self.head = nn.Linear(size, 1)

    def forward(self, x0):
        x = x0
        for u, v in zip(self.u, self.v, strict=True):
            x = x0 * u(v(x)) + x
        return self.head(self.deep(x))


class GDCN(nn.Module):
    def __init__(self, width=2048, layers=3, hidden=(1024, 512)):
        super().__init__()
        self.w = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.g = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.mlp1 = nn.Linear(width, hidden[0])
        self.mlp2 = nn.Linear(hidden[0], hidden[1])
        self.out = nn.Linear(hidden[1], 1)

    def forward(self, x0):
        x = x0
        for w, g in zip(self.w, self.g, strict=True):
            x = x0 * w(x) * torch.sigmoid(g(x)) + x
        x = torch.relu(self.mlp1(x))
        x = torch.relu(self.mlp2(x))
        return self.out(x)


class FieldAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.res = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, f, d = x.shape
        q, k, v = (m(x).view(b, f, self.heads, -1).permute(0, 2, 1, 3) for m in (self.query, self.key, self.value))
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d // self.heads), dim=-1)
        mixed = (scores.to(v.dtype) @ v).permute(0, 2, 1, 3).reshape(b, f, d)
        return F.relu(mixed + self.res(x))


class AutoInt(nn.Module):
    def __init__(self, fields=32, dim=512, heads=4, layers=3, hidden=(1024, 1024)):
        super().__init__()
        self.layers = nn.Sequential(*[FieldAttention(dim, heads) for _ in range(layers)])
        self.deep = nn.Sequential(
            nn.Linear(fields * dim, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], hidden[1]), nn.ReLU()
        )
        self.out = nn.Linear(fields * dim + hidden[1], 1)

    def forward(self, x):
        return self.out(torch.cat([self.layers(x).flatten(1), self.deep(x.flatten(1))], 1))


class MaskBlock(nn.Module):
    def __init__(self, width, aggregated, out):
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(width, aggregated), nn.ReLU(), nn.Linear(aggregated, width))
        self.hidden = nn.Linear(width, out)
        self.norm = nn.LayerNorm(out)

    def forward(self, embeddings, x):
        return F.relu(self.norm(self.hidden(x * self.mask(embeddings))))


class MaskNet(nn.Module):
    def __init__(self, fields=24, dim=64, aggregated=2048, out=1024, blocks=3, hidden=(1024, 512)):
        super().__init__()
        width = fields * dim
        self.norms = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList([MaskBlock(width, aggregated, out) for _ in range(blocks)])
        self.top = nn.Sequential(
            nn.Linear(blocks * out, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], hidden[1]), nn.ReLU(), nn.Linear(hidden[1], 1)
        )  # fmt: skip

    def forward(self, x):
        flat, normed = x.flatten(1), self.norms(x).flatten(1)
        return self.top(torch.cat([block(flat, normed) for block in self.blocks], dim=1))


def tower(sizes, *, dropout=0.0, last=False):
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last or i + 2 < len(sizes):
            layers += [nn.BatchNorm1d(b), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class FinalMLP(nn.Module):
    def __init__(self, width=2048, context=128, gate=512, hidden=(2048, 1024, 1024), heads=4, dropout=0.1):
        super().__init__()
        self.gate1 = nn.Sequential(nn.Linear(context, gate), nn.ReLU(), nn.Linear(gate, width), nn.Sigmoid())
        self.gate2 = nn.Sequential(nn.Linear(context, gate), nn.ReLU(), nn.Linear(gate, width), nn.Sigmoid())
        self.mlp1 = tower([width, *hidden], dropout=dropout, last=True)
        self.mlp2 = tower([width, *hidden], dropout=dropout, last=True)
        self.heads, size = heads, hidden[-1] // heads
        self.w1 = nn.Linear(hidden[-1], 1)
        self.w2 = nn.Linear(hidden[-1], 1)
        self.bilinear = nn.Parameter(torch.randn(heads, size, size) / size)

    def forward(self, x, user, item):
        a = self.mlp1(2 * self.gate1(user) * x)
        b = self.mlp2(2 * self.gate2(item) * x)
        left = a.view(len(a), self.heads, -1)
        right = b.view(len(b), self.heads, -1)
        joint = torch.einsum("bhi,hij,bhj->bh", left, self.bilinear, right).sum(1, keepdim=True)
        return self.w1(a) + self.w2(b) + joint


class TwoTower(nn.Module):
    def __init__(self, user=1024, item=768, hidden=(2048, 1024), out=256, temperature=0.05):
        super().__init__()
        self.user_tower = tower([user, *hidden, out])
        self.item_tower = tower([item, *hidden, out])
        self.temperature = temperature

    def forward(self, user, item):
        u = F.normalize(self.user_tower(user), dim=-1)
        v = F.normalize(self.item_tower(item), dim=-1)
        return u @ v.t() / self.temperature


class ResidualBlock(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class ResMLP(nn.Module):
    def __init__(self, user=1024, item=1024, width=2048, hidden=4096, blocks=3):
        super().__init__()
        self.user, self.item = nn.Linear(user, width), nn.Linear(item, width)
        self.gate, self.value = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.blocks = nn.ModuleList([ResidualBlock(width, hidden) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, user, item):
        both = torch.cat([self.user(user), self.item(item)], dim=-1)
        x = torch.sigmoid(self.gate(both)) * self.value(both)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.ffn = SwiGLU(dim, hidden)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.norm2(x))


class Llama(nn.Module):
    """SASRec's task, next item by its score, with today's transformer block."""

    def __init__(self, items=4096, length=128, dim=1024, heads=8, hidden=2816, layers=3):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.positions = nn.Embedding(length, dim)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList([LlamaBlock(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(dim)

    def forward(self, history, target):
        x = self.items(history) + self.positions(torch.arange(history.shape[1], device=history.device))
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) * self.items(target)).sum(-1)


class BST(nn.Module):
    def __init__(self, dim=512, heads=8, ffn=2048, layers=3, length=64, other=512, hidden=(1024, 512)):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, length, dim) * 0.02)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, heads, ffn, batch_first=True), layers)
        self.mlp = nn.Sequential(
            nn.Linear(dim + other, hidden[0]), nn.LeakyReLU(), nn.Linear(hidden[0], hidden[1]), nn.LeakyReLU(), nn.Linear(hidden[1], 1)
        )  # fmt: skip

    def forward(self, history, other):
        h = self.encoder(history + self.position)
        return self.mlp(torch.cat([h.mean(dim=1), other], dim=1))


@dataclass(frozen=True)
class Entry:
    """A model of the file: its class, rows of a batch, shapes of its inputs by row, and its sizes on a CPU."""

    kind: type[nn.Module]
    rows: int
    inputs: Callable[[Any], list[tuple[int, ...]]]  # of the arguments: floats by shape
    tiny: dict[str, Any]


@dataclass(frozen=True)
class Ids:
    """An input of whole numbers below `below`."""

    shape: tuple[int, ...]
    below: int


def _entries():
    small = {"hidden": (96, 64)}
    return {
        "deepfm": Entry(DeepFM, 16384, lambda a: [Ids((a.fields,), VOCABULARY), (a.dense,)], {"fields": 6, "dim": 16, **small}),
        "xdeepfm": Entry(XDeepFM, 4096, lambda a: [(a.fields, a.dim)], {"fields": 6, "dim": 16, "cin": (8, 8), "hidden": (96, 64, 64)}),
        "pnn": Entry(PNN, 8192, lambda a: [(a.fields, a.dim)], {"fields": 6, "dim": 16, "h1": 96, "h2": 64}),
        "mmoe": Entry(MMoE, 8192, lambda a: [(a.width,)], {"width": 96, "hidden": 96, "out": 128, "experts": 3}),
        "ple": Entry(PLE, 8192, lambda a: [(a.width,)], {"width": 96, "hidden": 96, "out": 64}),
        "din": Entry(DIN, 2048, lambda a: [(a.profile,), (a.dim,), (48, a.dim), Ids((), 49)], {"dim": 32, "profile": 32, "attention": (96, 64), **small}),
        "dcnmix": Entry(DCNMix, 8192, lambda a: [(a.width,)], {"width": 128, "rank": 32, "experts": 2, **small}),
        "dcnlow": Entry(DCNLow, 8192, lambda a: [(a.width,)], {"width": 128, "rank": 64, "hidden": (96, 64)}),
        "gdcn": Entry(GDCN, 8192, lambda a: [(a.width,)], {"width": 96, **small}),
        "autoint": Entry(AutoInt, 2048, lambda a: [(a.fields, a.dim)], {"fields": 5, "dim": 64, "layers": 2, **small}),
        "masknet": Entry(MaskNet, 8192, lambda a: [(a.fields, a.dim)], {"fields": 6, "dim": 16, "aggregated": 128, "out": 64, "blocks": 2, **small}),
        "finalmlp": Entry(FinalMLP, 8192, lambda a: [(a.width,), (a.context,), (a.context,)], {"width": 96, "context": 64, "gate": 64, "hidden": (96, 64)}),
        "twotower": Entry(TwoTower, 8192, lambda a: [(a.user,), (a.item,)], {"user": 96, "item": 64, "hidden": (96, 64), "out": 64}),
        "resmlp": Entry(ResMLP, 8192, lambda a: [(a.user,), (a.item,)], {"user": 64, "item": 64, "width": 64, "hidden": 128, "blocks": 2}),
        "llama": Entry(Llama, 64, lambda a: [Ids((a.length,), a.items), Ids((a.length,), a.items)], {"items": 100, "length": 12, "dim": 64, "heads": 4, "hidden": 128, "layers": 2}),
        "bst": Entry(BST, 128, lambda a: [(a.length, a.dim), (a.other,)], {"dim": 64, "heads": 4, "ffn": 128, "layers": 2, "length": 7, "other": 32, **small}),
    }  # fmt: skip


MODELS = _entries()
ROWS = {name: entry.rows for name, entry in MODELS.items()}


def make(name, device, generator, *, tiny=False, rows=None):
    """The model and its inputs; `tiny`: sizes for a CPU, 32 rows."""
    entry = MODELS[name]
    with torch.device(device):
        model = entry.kind(**entry.tiny) if tiny else entry.kind()
    return model, draw(name, device, generator, rows or (32 if tiny else ROWS[name]), tiny=tiny)


def draw(name, device, generator, rows, *, tiny=False):
    """Inputs of a model."""
    entry = MODELS[name]
    found = []
    for shape in entry.inputs(_arguments(entry, tiny)):
        if isinstance(shape, Ids):
            found.append(torch.randint(shape.below, (rows, *shape.shape), device=device, generator=generator))
        else:
            found.append(torch.randn(rows, *shape, device=device, generator=generator))
    return tuple(found)


def _arguments(entry, tiny):
    import inspect
    from types import SimpleNamespace

    defaults = {k: p.default for k, p in inspect.signature(entry.kind.__init__).parameters.items() if k != "self"}
    return SimpleNamespace(**{**defaults, **(entry.tiny if tiny else {})})
