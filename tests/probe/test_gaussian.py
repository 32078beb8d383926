"""Mean and covariance converge at the rate of sampling, however rows are batched, and samples have them."""

import math

import pytest
import torch
from torch import Tensor

from loka.probe.gaussian import Gaussian
from loka.probe.scatter import BLOCK, RANK, SketchedScatter, shrink

CPU = torch.device("cpu")


def truth(width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A mean and a root of a covariance with a few strong directions."""
    g = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(width, generator=g)
    directions = torch.randn(width, 4, generator=g)
    return mean, torch.cat([directions, 0.5 * torch.eye(width)], 1)


def rows_of(mean: Tensor, root: Tensor, count: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return mean + torch.randn(count, root.shape[1], generator=g) @ root.T


def learn(rows: Tensor, *sizes: int, cap: int = 4096) -> Gaussian:
    gaussian = Gaussian(rows.shape[1], CPU, cap=cap)
    for part in rows.split(list(sizes) if sizes else len(rows)):
        gaussian.update(part)
    return gaussian


def test_errors_fall_like_one_over_the_root_of_the_rows() -> None:
    mean, root = truth(24)
    covariance = root @ root.T
    counts, errors = [256, 1024, 4096, 16384, 65536], []
    for count in counts:
        found = [learn(rows_of(mean, root, count, seed)) for seed in range(4)]
        of_mean = sum(float((g.mean - mean).norm()) for g in found)
        of_covariance = sum(float((g.covariance() - covariance).norm()) for g in found)
        errors.append((of_mean, of_covariance))
    for column in range(2):
        slope = math.log(errors[-1][column] / errors[0][column]) / math.log(counts[-1] / counts[0])
        assert slope == pytest.approx(-0.5, abs=0.08)


@pytest.mark.parametrize("cap", [4096, 16])
def test_batches_equal_one_pass(cap: int) -> None:
    mean, root = truth(40)
    rows = rows_of(mean + 100, root, 900, 1)  # a mean far from zero: sums of squares would cancel
    whole, batched = learn(rows, cap=cap), learn(rows, 1, 399, 300, 200, cap=cap)
    exact = rows.double()
    torch.testing.assert_close(batched.mean, exact.mean(0).float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(batched.covariance(), whole.covariance(), rtol=1e-3, atol=1e-3)
    if cap == 4096:
        torch.testing.assert_close(batched.covariance(), torch.cov(exact.T).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cap", [4096, 16])
def test_merging_equals_one_pass(cap: int) -> None:
    mean, root = truth(40)
    rows = rows_of(mean, root, 700, 2)
    first, second = learn(rows[:200], cap=cap), learn(rows[200:], cap=cap)
    first.merge(second)
    whole = learn(rows, cap=cap)
    torch.testing.assert_close(first.mean, whole.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.covariance(), whole.covariance(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="do not merge"):
        first.merge(Gaussian(7, CPU))


@pytest.mark.parametrize("cap", [4096, 16])
def test_samples_have_what_was_learned(cap: int) -> None:
    mean, root = truth(40)
    gaussian = learn(rows_of(mean, root, 20_000, 3), cap=cap)
    drawn = gaussian.sample(40_000, torch.Generator().manual_seed(0))
    assert float((drawn.mean(0) - mean).abs().max()) < 0.1
    covariance = root @ root.T
    assert float((torch.cov(drawn.T) - covariance).norm() / covariance.norm()) < 0.05
    torch.testing.assert_close(gaussian.deviation(), covariance.diagonal().sqrt(), rtol=0.05, atol=0.01)


def test_a_sketch_is_exact_inside_blocks_and_keeps_what_crosses_them() -> None:
    width = 3 * BLOCK + 10
    mean, root = truth(width, seed=5)
    rows = rows_of(mean, root, 3000, 4)
    gaussian = learn(rows, 1000, 2000, cap=BLOCK)
    assert gaussian.kind == f"block-diagonal ({BLOCK}) + rank {RANK}, width {width}"
    found, exact = gaussian.covariance(), torch.cov(rows.T)
    for start in range(0, width, BLOCK):
        part = slice(start, start + BLOCK)
        torch.testing.assert_close(found[part, part], exact[part, part], rtol=1e-3, atol=2e-3)
    across = exact.clone()
    for start in range(0, width, BLOCK):
        across[start : start + BLOCK, start : start + BLOCK] = 0
    missed = (found - exact)[across != 0].norm() / across.norm()
    assert float(missed) < 0.1
    assert 20 * SketchedScatter.bytes_for(100_000) < 4 * 100_000**2


def test_fewer_rows_than_channels_still_sample() -> None:
    gaussian = learn(torch.randn(10, 64, generator=torch.Generator().manual_seed(0)))
    drawn = gaussian.sample(2000, torch.Generator().manual_seed(1))
    assert torch.linalg.matrix_rank(drawn) == 64
    assert 0.5 < float(drawn.var(0).mean()) < 2


def test_shrinkage_removes_noise_and_leaves_structure() -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.cov(torch.randn(100, 50, generator=g).T)
    off = ~torch.eye(50, dtype=torch.bool)
    assert float(shrink(noise, 100)[off].norm()) < 0.2 * float(noise[off].norm())
    mean, root = truth(50)
    real = torch.cov(rows_of(mean, root, 5000, 0).T)
    torch.testing.assert_close(shrink(real, 5000), real, rtol=0.02, atol=0.02)


def test_rows_left_out_do_not_count() -> None:
    mean, root = truth(8)
    rows = rows_of(mean, root, 50, 0)
    dirty = torch.cat([rows, torch.full((3, 8), torch.nan)])
    found, clean = learn(dirty), learn(rows)
    torch.testing.assert_close(found.mean, clean.mean)
    assert float(found.count) == 50
    empty = Gaussian(8, CPU)
    empty.update(torch.zeros(0, 8))
    empty.update(torch.full((2, 8), torch.inf))
    assert float(empty.count) == 0
    with pytest.raises(ValueError, match="no finite row"):
        empty.sample(1, torch.Generator())


def test_constant_rows_sample_themselves() -> None:
    gaussian = learn(torch.full((20, 5), 2.5))
    assert torch.equal(gaussian.sample(3, torch.Generator()), torch.full((3, 5), 2.5))


def test_state_survives() -> None:
    mean, root = truth(40)
    for cap in (4096, 16):
        before = learn(rows_of(mean, root, 100, 0), cap=cap)
        after = Gaussian(40, CPU, cap=cap)
        after.load_state_dict(before.state_dict())
        assert torch.equal(
            after.sample(4, torch.Generator().manual_seed(2)), before.sample(4, torch.Generator().manual_seed(2))
        )
    with pytest.raises(ValueError, match="matrix is missing"):
        Gaussian(40, CPU).load_state_dict(before.state_dict())
