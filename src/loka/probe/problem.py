"""One GEMM of a site, with operands from one of four sources.

    fprop   y  = x  W^T      a = x     b = W
    dgrad   dx = dy W        a = dy    b = W^T
    wgrad   dW = dy^T x      a = dy^T  b = x^T       the rows of the batch are the contracted axis

`loka.probe.learned` describes the sources; the copula is multiplied by the actual weight. References are float64
products, so they do not depend on whether the process allows TF32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.watch import Watch
from loka.records import Gemm, Source

ROWS_PER_SAMPLE = 16  # rows of a drawn fprop or dgrad: 100 samples use 1,600 rows
WGRAD_ROWS = 128  # contracted rows of a drawn wgrad per sample: one whole 1x128 group
# ... and at most. Not fewer: a gradient of few examples is mostly noise, with a larger relative error.
MAX_WGRAD_ROWS = 512
WEIGHT_FLOPS = 2e9  # budget for drawing the weights of one GEMM; wide sites draw fewer, but at least MIN_WEIGHTS
# Each weight costs a draw, and a quantization and a product for every candidate. Rows are cheap.
MIN_WEIGHTS, MAX_WEIGHTS = (4, 8)
# at most this many columns of a result are computed; for wgrad also rows
MAX_OUTPUTS: dict[Gemm, int] = {"fprop": 256, "dgrad": 256, "wgrad": 128}
BLOCK = 128


@dataclass(frozen=True)
class Problem:
    """The operands of out = a b^T."""

    gemm: Gemm
    a: Tensor
    b: Tensor

    @property
    def rows(self) -> int:
        """Number of sampled rows."""
        return self.a.shape[1] if self.gemm == "wgrad" else self.a.shape[0]

    def select(self, index: Tensor) -> "Problem":
        """Return the same GEMM on some of the rows."""
        if self.gemm == "wgrad":
            return Problem(self.gemm, self.a[:, index].contiguous(), self.b[:, index].contiguous())
        return Problem(self.gemm, self.a[index], self.b)

    def keep(self, outputs: "Outputs") -> "Problem":
        """Return the same GEMM restricted to some of its outputs."""
        a = self.a if outputs.rows is None else self.a[outputs.rows]
        return Problem(self.gemm, a, self.b if outputs.columns is None else self.b[outputs.columns])

    def reference(self) -> Tensor:
        """Return the product in float64."""
        return self.a.double() @ self.b.double().T


@dataclass(frozen=True)
class Outputs:
    """Which rows (of a wgrad) and columns of a result are computed; None means all.

    Outputs depend on each other only through scales, so a wide GEMM is judged by random whole blocks of 128 outputs.
    The block with the largest element is always included, because it determines a tensorwise scale.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def choose(cls, problem: Problem, generator: torch.Generator) -> "Outputs":
        """Choose outputs for a GEMM: all of them, or whole blocks of a wide one."""
        limit = MAX_OUTPUTS[problem.gemm]
        rows = _choose_blocks(problem.a, limit, generator) if problem.gemm == "wgrad" else None
        return cls(rows, _choose_blocks(problem.b, limit, generator))


def _choose_blocks(operand: Tensor, limit: int, generator: torch.Generator) -> Tensor | None:
    """Choose rows of an operand in whole blocks, in order; None for all."""
    height = operand.shape[0]
    if height <= limit:
        return None
    largest = int(operand.abs().nan_to_num(0.0, 0.0, 0.0).amax(1).argmax()) // BLOCK
    others = [b for b in torch.randperm(-(-height // BLOCK), generator=generator).tolist() if b != largest]
    blocks = sorted([largest, *others[: limit // BLOCK - 1]])
    index = torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, height)) for b in blocks])
    return index.to(operand.device)


@dataclass(frozen=True)
class Chunk:
    """Several samples that share a weight: equal numbers of rows, one sample after the other."""

    problem: Problem
    samples: int


def rows_of(watch: Watch, gemm: Gemm) -> Problem:
    """Return the GEMM on a site's kept rows and its actual weight."""
    x, dy = watch.reservoir.x.float(), watch.reservoir.dy
    if gemm == "fprop":
        return Problem(gemm, x, weight_of(watch))
    if dy is None:
        raise ValueError(f"{watch.name}: no gradient was seen, so {gemm} cannot be evaluated")
    if gemm == "dgrad":
        return Problem(gemm, dy.float(), weight_of(watch).T.contiguous())
    return Problem(gemm, dy.float().T.contiguous(), x.T.contiguous())


def weight_of(watch: Watch) -> Tensor:
    """Return the actual weight [N, K]; for a grouped site that of one fixed expert."""
    return watch.draw("w", "rows", 1, torch.Generator().manual_seed(0))


def draw_chunks(
    watch: Watch, gemm: Gemm, source: Source, samples: int, generator: torch.Generator, outputs: Outputs | None = None
) -> Iterator[Chunk]:
    """Draw samples of a GEMM as a few large problems: one per weight, and a single one for wgrad, to be resampled."""
    outputs = outputs or Outputs()
    if gemm == "wgrad":
        x, dy = watch.draw_pair(source, min(samples * WGRAD_ROWS, MAX_WGRAD_ROWS), generator)
        yield Chunk(Problem(gemm, dy.T.contiguous(), x.T.contiguous()).keep(outputs), 1)
        return
    weights = 1 if source == "copula" else count_weights(watch.n, watch.k, samples)
    for count in split_samples(samples, weights):
        weight = weight_of(watch) if source == "copula" else watch.draw("w", source, watch.n, generator)
        a = watch.draw("x" if gemm == "fprop" else "dy", source, count * ROWS_PER_SAMPLE, generator)
        yield Chunk(Problem(gemm, a, weight if gemm == "fprop" else weight.T.contiguous()).keep(outputs), count)


def count_weights(n: int, k: int, samples: int) -> int:
    """Return how many weights to draw. Each costs a factorization of U and V and a triple product."""
    affordable = int(WEIGHT_FLOPS / (2 * n * k * (n + k) + (n**3 + k**3) / 3))
    return max(1, min(samples, MAX_WEIGHTS, max(affordable, MIN_WEIGHTS)))


def split_samples(samples: int, parts: int) -> list[int]:
    """Split a number into parts of nearly equal size."""
    return [samples // parts + (part < samples % parts) for part in range(parts)]
