"""Two families of ours for benchmarks/zoo.py: InterFormer, and HSTU over embedded events, with the Mods' norm and activation. Written so that an older loka builds them too (`--before`)."""

import torch
from torch import nn

try:
    from loka.nn.mix import compute_dtype
except ImportError:  # where it was before
    from loka.nn import compute_dtype

from loka.models import build, configure
from loka.models.hstu import HSTULayer, next_times
from loka.nn import Style, make_norm

ROWS = {"interformer": 2048, "hstu": 256}
STYLE = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")


class Histories(nn.Module):
    """HSTU as a ranker over embedded events: its layers and its norm, then one logit an event. x [total, d] -> [total, 1]."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = make_norm(config.style.norm, config.d, bias=config.style.bias)
        self.head = nn.Linear(config.d, 1)

    def forward(self, x, offsets, times, query_times):
        x = x.to(compute_dtype(x))
        for layer in self.layers:
            x = layer(x, offsets, times, query_times)
        return self.head(self.norm(x))


def make(name, device, generator):
    """The model and its inputs."""
    if name == "interformer":
        config = configure("interformer", "medium", layers=2, style=STYLE)
        rows = ROWS[name]
        dense = torch.randn(rows, config.n, config.d, device=device, generator=generator)
        wide = config.histories * config.d
        history = torch.randn(rows, config.length, wide, device=device, generator=generator)
        lengths = torch.randint(0, config.length + 1, (rows,), device=device, generator=generator)
        return build(config), (dense, history, lengths)
    config = configure("hstu", "base", d=1024, layers=4, heads=8, d_qk=128, d_v=128, max_length=320, style=STYLE)
    low, high = config.max_length // 5, config.max_length
    half = torch.randint(
        low, high + 1, (ROWS[name] // 2,), generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )
    lengths = torch.cat([half, low + high - half])  # pairs that add up: the total is known
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = int(offsets[-1])
    x = torch.randn(total, config.d, device=device, generator=generator)
    times = torch.randint(0, 10**6, (total,), device=device, generator=generator).sort().values
    offsets = offsets.to(device)
    return Histories(config), (x, offsets, times, next_times(times, offsets))
