import weakref

import torch
from torch import Tensor, nn

from loka import models
from loka.units.flow import Flow, Sink, follow
from loka.units.recording import Unknown, record


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.b(self.drop(y).flatten(1)) + self.a(y[:, 0])[:, :2]


def test_a_value_is_followed_through_views_cuts_and_dropout():
    flow = record(Net(), torch.randn(3, 2, 4))
    assert isinstance(flow, Flow)
    (value,) = flow.calls_of("norm")[0].outputs
    found = follow(flow, value, shift=False)
    assert isinstance(found, list)
    assert set(found) == {Sink("b", 2), Sink("a", 1)}
    assert follow(flow, value, shift=True) == "it is also read by drop"


def test_training_mode_and_hooks_are_left_as_they_were():
    model = Net()
    model.drop.eval()
    record(model, torch.randn(3, 2, 4))
    assert model.training
    assert not model.drop.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_operations_in_place_make_new_values():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y.relu_()
            return self.linear(y)

    flow = record(InPlace(), torch.randn(2, 4))
    assert isinstance(flow, Flow)
    assert follow(flow, flow.calls_of("norm")[0].outputs[0], shift=False) == "it is also read by relu_"


def test_weights_that_are_read_outside_of_their_module_are_known():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.linear.weight

    flow = record(Tied(), torch.randn(2, 4))
    assert isinstance(flow, Flow)
    assert flow.outside_reads == {"linear.weight"}


def test_models_of_this_package_need_no_example_and_no_storage():
    for family in models.names():
        flow = record(models.build(family, "tiny"))
        assert isinstance(flow, Flow), flow
        assert flow.results


def test_failures_are_reasons():
    found = record(Net(), torch.randn(3, 5))
    assert isinstance(found, Unknown)
    assert found.reason.startswith("the model failed on the example: RuntimeError")
    assert "pass example=" in record(Net()).reason  # type: ignore[union-attr]


def test_what_a_forward_has_let_go_of_is_not_kept() -> None:
    """All that a batch computes, at once, is more than a GPU has; a tensor that takes the place of another is not taken for it."""
    gone: list[bool] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                before = weakref.ref(x)
                x = torch.relu(layer(x) + 1.0)
                gone.append(before() is None)
            return x

    flow = record(Deep(), torch.ones(2, 8))
    assert isinstance(flow, Flow)
    assert gone[1:] == [True, True, True]  # the first is the example
    calls = [call for call in flow.calls if call.op in ("Linear", "add", "relu")]
    assert len({call.outputs for call in calls}) == len(calls) == 12
    assert [flow.maker(call.inputs[0]) for call in calls[1:]] == calls[:-1]
