"""U, V and M come back from snapshots at the rate of sampling; one snapshot alone gives something usable."""

import math

import pytest
import torch
from torch import Tensor

from loka.probe.matrix_normal import MatrixNormal

CPU = torch.device("cpu")


def truth(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """M, and covariances U (mean variance one) and V with correlations that decay."""
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(n, k, generator=g)

    def decaying(width: int, rho: float, scale: Tensor) -> Tensor:
        steps = torch.arange(width)
        root = scale.sqrt()
        return rho ** (steps[:, None] - steps).abs() * root[:, None] * root

    u = decaying(n, 0.6, torch.linspace(0.5, 1.5, n))
    return mean, u, decaying(k, 0.8, torch.linspace(0.2, 3, k))


def snapshots(mean: Tensor, u: Tensor, v: Tensor, count: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    left, right = torch.linalg.cholesky(u), torch.linalg.cholesky(v)
    return [mean + left @ torch.randn(mean.shape, generator=g) @ right.T for _ in range(count)]


def learn(weights: list[Tensor], **options: object) -> MatrixNormal:
    learned = MatrixNormal(*weights[0].shape, CPU, **options)
    for weight in weights:
        learned.update(weight)
    return learned


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_errors_fall_like_one_over_the_root_of_the_snapshots() -> None:
    mean, u, v = truth(12, 20)
    counts, errors = [16, 64, 256], []
    for count in counts:
        found = [learn(snapshots(mean, u, v, count, seed), momentum=0.9999) for seed in range(2)]
        errors.append(
            [
                sum(relative(m.mean, mean) for m in found),
                sum(relative(m.u.blocks[0], u) for m in found),
                sum(relative(m.v.blocks[0], v) for m in found),
            ]
        )
    for column, name in enumerate("MUV"):
        slope = math.log(errors[-1][column] / errors[0][column]) / math.log(counts[-1] / counts[0])
        assert -0.75 < slope < -0.35, (name, errors)  # the first snapshot, centred by its grand mean, fades like 1 / t


def test_one_snapshot_has_the_scale_of_rows_and_columns() -> None:
    _, u, v = truth(60, 80)
    (weight,) = snapshots(torch.zeros(60, 80), u, v, 1, 3)
    learned = learn([weight])
    drawn = torch.stack([learned.sample(torch.Generator().manual_seed(seed)) for seed in range(200)])
    assert float(drawn.std()) == pytest.approx(float(weight.std()), rel=0.1)
    columns = torch.corrcoef(torch.stack([drawn.std((0, 1)), v.diagonal().sqrt()]))[0, 1]
    assert float(columns) > 0.9


def test_weights_that_settle_are_sampled_near_themselves() -> None:
    g = torch.Generator().manual_seed(0)
    final = torch.randn(16, 24, generator=g)
    learned = learn([final + 0.5**t * torch.randn(16, 24, generator=g) for t in range(80)])
    assert relative(learned.mean, final) < 0.05
    assert relative(learned.sample(torch.Generator().manual_seed(1)), final) < 0.2


def test_wide_sides_are_block_diagonal_and_large_means_are_summed() -> None:
    mean, u, v = truth(140, 300)
    learned = learn(snapshots(mean, u, v, 3, 0), cap=130, whole_mean=False)
    assert learned.kind == "U block-diagonal (128), V block-diagonal (128), M from row and column means"
    drawn = learned.sample(torch.Generator().manual_seed(0))
    assert drawn.shape == (140, 300)
    assert bool(drawn.isfinite().all())
    whole = learn(snapshots(mean, u, v, 3, 0), cap=1000, whole_mean=False)
    for side, other in ((learned.u, whole.u), (learned.v, whole.v)):
        assert side.blocks.shape[1] == 128
        found, exact = (s.blocks.diagonal(dim1=1, dim2=2).flatten()[: s.width] for s in (side, other))
        assert relative(found, exact) < 0.3
    assert MatrixNormal.bytes_for(140, 300, cap=130, whole_mean=False) < MatrixNormal.bytes_for(140, 300)


def test_degenerate_weights_are_defined() -> None:
    frozen = learn([torch.full((4, 6), 0.5)] * 3)
    assert torch.allclose(frozen.sample(torch.Generator()), torch.full((4, 6), 0.5))
    still = learn([torch.eye(4, 6)] * 60)
    assert relative(still.sample(torch.Generator()), torch.eye(4, 6)) < 0.3
    broken = MatrixNormal(4, 6, CPU)
    broken.update(torch.full((4, 6), torch.nan))
    assert broken.snapshots == 0
    with pytest.raises(ValueError, match="no finite weight"):
        broken.sample(torch.Generator())
    with pytest.raises(ValueError, match="momentum=1"):
        MatrixNormal(4, 6, CPU, momentum=1)


def test_state_survives() -> None:
    mean, u, v = truth(8, 10)
    weights = snapshots(mean, u, v, 6, 0)
    before, after = learn(weights[:3]), MatrixNormal(8, 10, CPU)
    after.load_state_dict(before.state_dict())
    for learned in (before, after):
        for weight in weights[3:]:
            learned.update(weight)
    assert torch.equal(before.sample(torch.Generator().manual_seed(1)), after.sample(torch.Generator().manual_seed(1)))
    with pytest.raises(ValueError, match="mean is"):
        MatrixNormal(9, 10, CPU).load_state_dict(before.state_dict())
