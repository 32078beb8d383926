"""Sources of operands for an evaluation: real rows, learned distributions, or N(0, 1).

    rows        kept rows of x and dy, of the same examples; the actual W          the control
    gaussian    mu + L z;  M + L_U Z L_V^T                                         what the published method uses
    copula      the same dependence with the empirical marginals                   keeps tails, zeros, outlier channels
    normal      N(0, 1)                                                            what kernel benchmarks usually use

Only real rows keep x and dy of the same example together. The other sources draw them independently, so their weight
gradient dy^T x is noise around the product of the means, as the weight gradient of a trained model nearly is.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from loka.probe.gaussian import Gaussian
from loka.probe.marginals import Marginals
from loka.probe.reservoir import Reservoir
from loka.records import Role

Source = Literal["rows", "gaussian", "copula", "normal"]


def check_source(source: str) -> None:
    """Raise ValueError for an unknown source."""
    if source not in get_args(Source):
        raise ValueError(f"source={source!r}: expected one of {', '.join(get_args(Source))}")


def pick_rows(reservoir: Reservoir, count: int, generator: torch.Generator, site: str) -> Tensor:
    """Draw indices of `count` kept rows, without replacement if there are enough."""
    kept = reservoir.kept
    if kept == 0:
        raise ValueError(f"{site}: no row was kept, so there is none to draw")
    draw = (
        torch.randint(kept, (count,), generator=generator)
        if count > kept
        else torch.randperm(kept, generator=generator)
    )
    return draw[:count].to(reservoir.x.device)


def rows_of(reservoir: Reservoir, role: Role, site: str) -> Tensor:
    """Return the kept rows of x or dy."""
    rows = reservoir.x if role == "x" else reservoir.dy
    if rows is None:
        raise ValueError(f"{site}: no gradient was seen, so there is no dy to draw")
    return rows


def draw_modelled(
    source: Source, learned: Gaussian | None, kept: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Draw float32 [count, width of kept] from a Gaussian, its copula, or N(0, 1)."""
    if source == "normal":
        return torch.randn(count, kept.shape[1], generator=generator, device=generator.device).to(kept.device)
    assert learned is not None
    if source == "gaussian":
        return learned.sample(count, generator)
    normals = learned.normals(count, generator)
    deviation = learned.deviation()
    standard = normals / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return Marginals(kept).apply(standard)
