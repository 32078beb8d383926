"""Small models, ids and requests for the tests of this room."""

import torch
from torch import Tensor

from loka.data.batch import Jagged
from loka.inference import Request
from loka.models import build
from loka.models.beam import Beams, search
from loka.models.onerec import OneRec
from loka.semantic_ids import SemanticIndex, Trie


def make_model(size: str = "tiny-moe", seed: int = 0, **options: object) -> OneRec:
    torch.manual_seed(seed)
    model = build("onerec", size, **options)
    assert isinstance(model, OneRec)
    with torch.no_grad():  # untrained heads give nearly flat scores: sharpen them, so that beams are far apart
        for head in model.heads:
            head.linear.weight.mul_(4.0)
        for module in model.modules():
            if hasattr(module, "balance"):
                module.balance.copy_(torch.randint(-50_000, 50_000, module.balance.shape))
    return model.eval()


def make_index(model: OneRec, items: int = 300, seed: int = 1) -> SemanticIndex:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(model.config.codebooks)
    codes = torch.unique((torch.rand(items, len(sizes), generator=g) * sizes).long(), dim=0)
    return SemanticIndex(codes, model.config.codebooks, torch.arange(1, len(codes) + 1))


def make_requests(model: OneRec, lengths: tuple[int, ...], seed: int = 2) -> list[Request]:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(
        (*model.config.codebooks, model.config.items) if model.config.items else model.config.codebooks
    )
    out = []
    for n in lengths:
        static = torch.randn(model.config.static, generator=g) if model.config.static else None
        out.append(Request((torch.rand(n, len(sizes), generator=g) * sizes).long(), static))
    return out


def search_plainly(
    model: OneRec, requests: list[Request], beams: int, valid: Trie | None, normalize: str = "codebook"
) -> Beams:
    offsets = torch.tensor([0, *(len(r.history) for r in requests)]).cumsum(0)
    static = [r.static for r in requests if r.static is not None]
    features: Tensor | None = torch.stack(static) if static else None
    context = model.encode(Jagged(torch.cat([r.history for r in requests]), offsets), features)
    return search(model, context, beams=beams, valid=valid, normalize=normalize)
