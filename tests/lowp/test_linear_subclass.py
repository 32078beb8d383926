"""Converted linears where they are copied, pickled, replicated or exported: what can be done is done, and the rest is refused by its name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from loka.lowp.linear import Linear, refuse
from loka.placing import convert, revert


class Named(nn.Linear):
    """A subclass that adds to nn.Linear."""

    def twice(self) -> int:
        return 2 * self.in_features


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Named(32, 48), nn.ReLU(), nn.Linear(48, 16))
    convert(model, recipe="rowwise", backend="reference")
    return model


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=lambda f: f.__name__)
def test_a_copy_is_converted_independent_and_can_be_reverted(copied) -> None:
    model, x = make(), torch.randn(8, 32)
    twin, expected = copied(model), model(x)
    assert isinstance(twin[0], Linear)
    assert isinstance(twin[0], Named)
    assert type(twin[0]) is type(model[0])
    assert twin[0].twice() == 64
    assert torch.equal(twin(x), expected)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    twin(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(twin(x), expected)
    assert torch.equal(model(x), expected)
    assert revert(twin) == 2
    assert [type(m) for m in twin] == [Named, nn.ReLU, nn.Linear]


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 is converted: the replicas of nn\.DataParallel.*DistributedDataParallel"):
        make()[0]._replicate_for_data_parallel()


@pytest.mark.parametrize(
    "way", [lambda m, x: torch.export.export(m, x, strict=False), lambda m, x: torch.jit.script(m)]
)
def test_exporters_are_refused_with_the_way_on(way) -> None:
    with pytest.raises(ValueError, match=r"0 is converted: .*loka\.export\(model.*loka\.revert"):
        way(make().eval(), (torch.randn(8, 32),))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_are_kept_and_named(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, dtype=dtype)])
    summary = convert(model, recipe="rowwise", backend="reference")
    assert list(summary.converted) == ["0"]
    assert str(dtype) in summary.kept["1"]
    assert refuse(nn.Linear(8, 8, dtype=torch.bfloat16)) is None


def test_what_auto_picks_is_written_down_anew_where_a_linear_moves() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48))
    convert(model, recipe="rowwise")
    assert "reference on cpu" not in repr(model)
    model.to_empty(device="cpu")
    assert "auto (reference on cpu)" in repr(model)
    binding = model[0].binding
    assert model.to("cpu")[0].binding is binding  # nothing moved
