"""A file that agrees with its model as closely as the model with itself is accepted, any other is not."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.exporting.agreement import CLOSE, Agreement, compare, differ
from loka.exporting.signature import flatten_result, take_apart
from loka.placing import plan_everything


class Deep(nn.Module):
    """Ids in, FP8 layers behind norms: what a rounding flips is multiplied by every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def make(layers: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, ids = Deep(layers).eval().to(dtype), torch.randint(0, 50, (32,))
    loka.convert(model, plan_everything(model, (ids,), serving=True), freeze=True)
    return model, ids


@torch.no_grad()
def agree(
    model: nn.Module,
    ids: Tensor,
    run: Callable[[Tensor], Tensor],
    tolerance: float | None = None,
    *,
    dynamic: bool = True,
) -> Agreement:
    expected = flatten_result(model(ids))
    return compare(
        lambda given: [run(given[0])], model, take_apart((ids,), ["ids"]), ["ids"], expected, dynamic=dynamic, tolerance=tolerance
    )  # fmt: skip


def off_by(model: nn.Module, share: float) -> Callable[[Tensor], Tensor]:
    def run(ids: Tensor) -> Tensor:
        y = model(ids)
        return y + share * y.norm() / y.numel() ** 0.5 * torch.randn(
            y.shape, generator=torch.Generator().manual_seed(3)
        )

    return run


def test_a_file_that_is_close_needs_no_second_look() -> None:
    model, ids = make(2)
    found = agree(model, ids, model)
    assert (found.difference, found.moved) == (0.0, None)
    assert found.rows == [32, 35]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_fp8_model_moves_by_itself_and_a_file_may_as_much(dtype: torch.dtype) -> None:
    model, ids = make(6, dtype)
    with pytest.raises(ValueError, match="the model's own results move") as told:
        agree(model, ids, off_by(model, 0.5))
    moved = float(str(told.value).split("more than the ")[1].split()[0])
    assert CLOSE < moved < 0.2  # tables are nudged: the model has no input of floating point
    found = agree(model, ids, off_by(model, 0.7 * moved), dynamic=False)
    assert found.moved == pytest.approx(moved, rel=1e-2)
    assert CLOSE < found.difference < moved


def test_a_model_in_high_precision_does_not_move_so_a_file_must_be_close() -> None:
    torch.manual_seed(0)
    model, ids = Deep(6).eval(), torch.randint(0, 50, (32,))
    with pytest.raises(ValueError, match=r"differs from the model by 0\.02"):
        agree(model, ids, off_by(model, 0.02), dynamic=False)


def test_a_given_tolerance_is_all_that_counts() -> None:
    model, ids = make(6)
    with pytest.raises(ValueError, match=r"more than 0\.001; nothing was written"):
        agree(model, ids, off_by(model, 0.004), 0.001)
    assert agree(model, ids, off_by(model, 0.5), 1.0).moved is None


def test_tables_are_left_as_they_were() -> None:
    model, ids = make(6)
    before = model(ids)
    with pytest.raises(ValueError, match="nothing was written"):
        agree(model, ids, off_by(model, 0.5))
    assert torch.equal(model(ids), before)
    assert not model.table._forward_hooks  # type: ignore[operator, union-attr]


def test_nan_is_a_difference_wherever_it_is() -> None:
    """In one of several results, or at the second number of rows only."""
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])
    for results in ([good, bad], [bad, good]):
        assert differ(results, [good, good]) == math.inf
    model, ids = make(1)
    with pytest.raises(ValueError, match="differs from the model by inf"):
        agree(model, ids, lambda given: model(given) * (math.nan if len(given) > len(ids) else 1.0))


def test_a_model_that_moves_without_bound_excuses_nothing() -> None:
    """Its inputs decide, for example, which scores are masked out: rounding one of them differently says nothing."""
    assert not Agreement(0.5, [8], moved=math.inf).accepts(None)
    assert not Agreement(math.inf, [8], moved=math.inf).accepts(None)
    assert not Agreement(0.5, [8], moved=math.nan).accepts(None)
    assert Agreement(0.02, [8], moved=0.03).accepts(None)
