"""A class in front of a module's own: made once, pickled by its parts, taken away whatever stands in front of it."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from loka.lowp import Linear
from loka.nn.mixing import mix, unmix


class Louder(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Own(nn.Linear):
    """A user's subclass."""


def test_a_mixed_module_is_pickled_copied_and_taken_back() -> None:
    module, x = Own(3, 2), torch.randn(4, 3)
    plain = module(x)
    module.__class__ = mix(Own, Louder)
    assert mix(Own, Louder) is type(module)
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(made, Own)
        torch.testing.assert_close(made(x), 2 * plain)
        made.__class__ = unmix(type(made), Louder)
        assert type(made) is Own
        assert torch.equal(made(x), plain)


def test_what_was_put_on_top_since_stays() -> None:
    both = mix(mix(Own, Louder), Odd)
    wrapped = type("Wrapped", (both,), {})
    assert unmix(both, Louder) is mix(Own, Odd)
    assert unmix(wrapped, Louder).__bases__ == (mix(Own, Odd),)
    with pytest.raises(ValueError, match="Own no longer has the mixin Louder"):
        unmix(Own, Louder)


def test_a_linear_in_low_precision_is_what_the_two_mixed_are() -> None:
    assert mix(nn.Linear, Linear) is Linear
    assert unmix(Linear, Linear) is nn.Linear
    assert unmix(mix(Own, Linear), Linear) is Own
    wrapped = type("FSDPLinear", (Linear,), {})
    assert unmix(wrapped, Linear).__bases__ == (nn.Linear,)


class Around(nn.Module):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return super().forward(*args, **kwargs) + 1


class Further(nn.Module):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return super().forward(*args, **kwargs) + 1


class TwoInputs(nn.Module):
    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return dense + sparse


def test_a_forward_of_any_arguments_keeps_the_names_of_the_modules_own() -> None:
    module, x = TwoInputs(), torch.randn(4, 3)
    module.__class__ = mix(mix(TwoInputs, Around), Further)
    assert list(inspect.signature(module.forward).parameters) == ["dense", "sparse"]
    assert [node.name for node in torch.fx.symbolic_trace(module).graph.nodes][:2] == ["dense", "sparse"]
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(module, (x, x), dynamic_shapes={"dense": rows, "sparse": rows}).module()
    assert torch.equal(exported(x[:2], x[:2]), 2 * x[:2] + 2)
    for made in (module, pickle.loads(pickle.dumps(module))):
        assert torch.equal(made(sparse=x, dense=x), 2 * x + 2)
        made.__class__ = unmix(unmix(type(made), Around), Further)
        assert type(made) is TwoInputs


class Inherits(Louder):
    """Its forward is another mixin's."""


@pytest.mark.parametrize("mixin", [Louder, Inherits])
def test_a_forward_that_was_kept_runs_the_module_without_the_mixin(mixin: type[nn.Module]) -> None:
    """As `model.forward = torch.compile(model.forward)` keeps it."""
    module, x = Own(3, 2), torch.randn(4, 3)
    plain = module(x)
    module.__class__ = mix(mix(Own, mixin), Odd)
    module.forward = module.forward
    module.__class__ = unmix(type(module), mixin)
    torch.testing.assert_close(module(x), plain + 1)
    module.__class__ = unmix(type(module), Odd)
    assert torch.equal(module(x), plain)
