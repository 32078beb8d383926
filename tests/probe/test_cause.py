"""A planted difficulty is found by taking it away, and nothing is found where nothing was planted."""

import torch
from torch import Tensor

from loka.kernels.scaled_mm import GemmWay
from loka.probe.cause import find_causes, measure_error
from loka.probe.engine import Engine
from loka.probe.evaluate import Trial
from loka.probe.problem import Problem
from loka.records import Gemm

ENGINE = Engine.named("reference")
LIMIT = {"fprop": 0.2, "dgrad": 0.1, "wgrad": 0.1}


def trial(spec: str = "e4m3:row") -> Trial:
    return Trial("rowwise", GemmWay.parse(f"{spec}@{spec}"), ENGINE)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causes(gemm: Gemm, a: Tensor, b: Tensor, spec: str = "e4m3:row", limit: float | None = None) -> list[str]:
    problem = Problem(gemm, a, b)
    found = find_causes(problem, trial(spec), LIMIT[gemm] if limit is None else limit)
    error = measure_error(problem, trial(spec))
    for cause in found:
        assert cause.error == error
        assert cause.without is None or cause.without < max(error, cause.without)
    return [cause.text for cause in found]


def test_outlier_channels() -> None:
    x, weight = normal(64, 64) * 1e-6, normal(32, 64, seed=1)
    x[:, [5, 9]] = 1000.0
    weight[:, [5, 9]] = 0
    found = causes("fprop", x, weight)
    assert found[0].startswith("2 outlier channels in the input")
    (first, *_) = find_causes(Problem("fprop", x, weight), trial(), 0.2)
    assert first.mod is not None
    assert first.mod.startswith("block_norm")
    assert first.without is not None
    assert first.without < 0.2 < first.error


def test_a_mean_that_dominates() -> None:
    """The weight cannot see a constant (its rows sum to zero), so only the small part matters, and the bias eats its bits."""
    x = normal(64, 64) * 0.01 + 30.0
    weight = normal(32, 64, seed=1)
    weight -= weight.mean(1, keepdim=True)
    found = causes("fprop", x, weight)
    assert any("bias dominates amax of the input" in text for text in found)


def test_rows_of_different_size_under_one_scale() -> None:
    x = normal(64, 64) * torch.exp(5 * normal(64, 1, seed=2))
    found = causes("fprop", x, normal(32, 64, seed=1), "e4m3:tensor")
    assert found[0].startswith("rows of the input differ in size")
    assert not causes("fprop", x, normal(32, 64, seed=1), "e4m3:row", limit=0.2)


def test_range_inside_a_group() -> None:
    x, weight = normal(64, 256) * 1e-6, normal(32, 256, seed=1) * 1e-8
    place = torch.randint(256, (64, 1), generator=torch.Generator().manual_seed(4))
    x.scatter_(1, place, 1e3)  # another channel in every row: no outlier channel, a tail in each
    weight[:] = normal(32, 256, seed=1)
    hidden = torch.zeros(64, 256).scatter_(1, place, 1.0)
    out = Problem("fprop", x, weight)
    assert hidden.sum() == 64
    found = find_causes(out, trial(), 0.001)
    assert any("range inside a row of the input" in cause.text or "limit" in cause.text for cause in found)


def test_gradients_name_their_own_operand() -> None:
    dy, weight = normal(64, 32) * 1e-7, normal(48, 32, seed=1)
    dy[:, 3] = 10 * normal(64, seed=5)
    weight[:, 3] = 0
    assert "outlier channel in the output gradient" in causes("dgrad", dy, weight)[0]


def test_a_limit_no_format_can_meet_is_recognised() -> None:
    found = causes("fprop", normal(64, 64), normal(32, 64, seed=1), limit=0.01)
    assert len(found) == 1
    assert "limit is below the format's own error" in found[0]


def test_products_that_cancel_are_recognised() -> None:
    half = normal(64, 128)
    weight = normal(32, 128, seed=1)
    x, w = torch.cat([half, half], 1), torch.cat([weight, -weight], 1)
    w[:, 128:] += 0.02 * normal(32, 128, seed=3)
    x[:, 128:] += 0.02 * normal(64, 128, seed=4)
    found = causes("fprop", x, w)
    assert any("products cancel" in text for text in found)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert causes("fprop", normal(64, 64), normal(32, 64, seed=1)) == []
