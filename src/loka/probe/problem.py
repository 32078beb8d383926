"""One GEMM of a site on operands drawn from somewhere.

    fprop   y  = x  W^T      a = x     b = W
    dgrad   dx = dy W        a = dy    b = W^T
    wgrad   dW = dy^T x      a = dy^T  b = x^T       the rows of the batch are the contracted axis

Where operands come from:

    rows       real rows a site kept, with its actual weight: the control for everything that is modelled
    copula     rows with the learned correlation and the empirical marginals (heavy tails survive), with the actual weight
    gaussian   rows of N(mu, Sigma) and a weight of the learned matrix normal: what the published method draws
    normal     N(0, 1) for both, which is what kernels are usually tested on: for comparison only

References are products in float64: whatever a process has allowed for float32 products (TF32), the reference is not touched by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.watch import Watch
from loka.records import Gemm, Source

ROWS_PER_SAMPLE = 16  # of a drawn fprop or dgrad: 100 samples look at 1,600 rows
WGRAD_ROWS = 128  # contracted rows of a drawn wgrad, for each sample asked for: one whole 1x128 group
# at most: a gradient of few examples is mostly noise, and its relative error larger than a batch's
MAX_WGRAD_ROWS = 512
WEIGHT_FLOPS = 2e9  # for drawing weights of one GEMM; wide sites draw fewer, at least MIN_WEIGHTS
# a weight costs a draw, a quantisation and a product for every candidate; rows are cheap
MIN_WEIGHTS, MAX_WEIGHTS = (4, 8)
# columns of a result that are looked at; wgrad: rows too
MAX_OUTPUTS: dict[Gemm, int] = {"fprop": 256, "dgrad": 256, "wgrad": 128}
BLOCK = 128


@dataclass(frozen=True)
class Problem:
    """out = a b^T, and the product the result is compared with."""

    gemm: Gemm
    a: Tensor
    b: Tensor

    @property
    def rows(self) -> int:
        """Number of sampled rows."""
        return self.a.shape[1] if self.gemm == "wgrad" else self.a.shape[0]

    def select(self, index: Tensor) -> "Problem":
        """The same GEMM on some of the rows."""
        if self.gemm == "wgrad":
            return Problem(self.gemm, self.a[:, index].contiguous(), self.b[:, index].contiguous())
        return Problem(self.gemm, self.a[index], self.b)

    def keep(self, outputs: "Outputs") -> "Problem":
        """The same GEMM with some of its outputs."""
        a = self.a if outputs.rows is None else self.a[outputs.rows]
        return Problem(self.gemm, a, self.b if outputs.columns is None else self.b[outputs.columns])

    def reference(self) -> Tensor:
        """The product in float64."""
        return self.a.double() @ self.b.double().T


@dataclass(frozen=True)
class Outputs:
    """Which rows (of a wgrad) and columns of a result are computed; None: all.

    Outputs do not depend on each other but through scales, so a wide GEMM is judged by whole blocks of 128 of them, drawn at random,
    the one with the largest element always among them: it decides the scale where there is only one.
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
    """Rows of an operand: whole blocks, in order."""
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
    """Several samples of one weight: equal numbers of rows, one sample after the other."""

    problem: Problem
    samples: int


def rows_of(watch: Watch, gemm: Gemm) -> Problem:
    """The GEMM on the rows a site kept and its actual weight."""
    x, dy = watch.reservoir.x.float(), watch.reservoir.dy
    if gemm == "fprop":
        return Problem(gemm, x, weight_of(watch))
    if dy is None:
        raise ValueError(f"{watch.name}: no gradient was seen, so {gemm} cannot be evaluated")
    if gemm == "dgrad":
        return Problem(gemm, dy.float(), weight_of(watch).T.contiguous())
    return Problem(gemm, dy.float().T.contiguous(), x.T.contiguous())


def weight_of(watch: Watch) -> Tensor:
    """The actual weight [N, K]; of a grouped site one expert's, always the same."""
    return watch.draw("w", "rows", 1, torch.Generator().manual_seed(0))


def draw_chunks(
    watch: Watch, gemm: Gemm, source: Source, samples: int, generator: torch.Generator, outputs: Outputs | None = None
) -> Iterator[Chunk]:
    """`samples` draws of a GEMM in few large products: all that share a weight together, and a wgrad in one, whose rows are resampled instead."""
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
    """How many weights are drawn for `samples` pairs: drawing one factors U and V and multiplies [N, N] by [N, K] by [K, K]."""
    affordable = int(WEIGHT_FLOPS / (2 * n * k * (n + k) + (n**3 + k**3) / 3))
    return max(1, min(samples, MAX_WEIGHTS, max(affordable, MIN_WEIGHTS)))


def split_samples(samples: int, parts: int) -> list[int]:
    """Parts of nearly equal size."""
    return [samples // parts + (part < samples % parts) for part in range(parts)]
