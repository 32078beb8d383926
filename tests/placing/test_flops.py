"""The share of the FLOPs that is counted, whatever a forward is called with and returns."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.placing import convert, plan_everything

SHARE = (64 * 64 * 2 + 64 * 64 * 3) / (
    64 * 64 * 5 + 64 * 3
)  # the data need no gradient, so the first linear has two GEMMs


class Named(nn.Module):
    """Its linears are called by the name of their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=F.relu(self.second(input=F.relu(self.first(input=x)))))


@dataclass
class Output:
    logit: Tensor


class Returning(Named):
    """Its result is a dataclass, which torch's own trees of tensors take for a leaf."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Checkpointed(Named):
    """Its second linear runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: F.relu(self.second(h)), F.relu(self.first(x)), use_reentrant=False, early_stop=False)
        return self.head(h)


class Detached(Named):
    """No gradient reaches its second linear."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(x)) + self.second(x).detach())


REPEATED = (64 * 64 * 2 + 64 * 64 * 4) / (64 * 64 * 6 + 64 * 3)
WITHOUT = (64 * 64 * 2 + 64 * 64) / (64 * 64 * 3 + 64 * 3)


@pytest.mark.parametrize(("kind", "share"), [(Checkpointed, REPEATED), (Detached, WITHOUT)])
@pytest.mark.parametrize("chains", [False, True])
def test_a_gemm_counts_as_often_as_it_runs(kind: type[nn.Module], share: float, chains: bool) -> None:
    model, example = kind(), torch.ones(8, 64)
    if chains:
        done = convert(model, plan_everything(model, example, linears=64), example=example)
    else:
        done = convert(model, recipe="rowwise", module_filter_fn=lambda m, name: name != "head", example=example)
    assert done.low_precision_share == pytest.approx(share)


@pytest.mark.parametrize("kind", [Named, Returning])
def test_every_gemm_of_the_step_is_counted(kind: type[nn.Module]) -> None:
    done = convert(kind(), recipe="rowwise", module_filter_fn=lambda m, name: name != "head", example=torch.ones(8, 64))
    assert done.low_precision_share == pytest.approx(SHARE)


@pytest.mark.parametrize("training", [False, True])
def test_inference_mode_counts_the_same(training: bool) -> None:
    """With an input that was made there, too."""
    shares = []
    for inference in (False, True):
        model = Named().train(training)
        with torch.inference_mode(inference):
            done = convert(model, recipe="rowwise", module_filter_fn=lambda m, name: name != "head", example=torch.ones(8, 64))  # fmt: skip
            assert model(torch.ones(8, 64)).shape == (8, 1)
        shares.append(done.low_precision_share)
        assert not any(p.is_inference() for p in model.parameters())
    assert shares[0] == shares[1]


class Weighing(Named):
    """Returns a parameter too, for a loss that learns the weights of its tasks: it requires a gradient in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.weight


@pytest.mark.parametrize("training", [False, True])
def test_a_parameter_among_the_results(training: bool) -> None:
    expected = convert(Named().train(training), recipe="rowwise", example=torch.ones(8, 64))
    done = convert(Weighing().train(training), recipe="rowwise", freeze=not training, example=torch.ones(8, 64))
    assert done.low_precision_share == expected.low_precision_share


class Reading(Named):
    """Reads the weight of its second linear without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.first(x), self.second.weight))


def test_a_linear_that_the_example_does_not_call_is_named() -> None:
    called = convert(Named(), recipe="rowwise", example=torch.ones(8, 64))
    read = convert(Reading(), recipe="rowwise", example=torch.ones(8, 64))
    assert not any("not called" in note for note in called.notes)
    assert any("not called" in note and note.endswith(": second") for note in read.notes)
