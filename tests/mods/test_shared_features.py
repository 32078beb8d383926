"""shared_features: compiled code reads the features of a layer once, and computes what it did, whatever the forward does in between."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.mods.sharing import SHARED

MODS = ["feature_layout", "feature_products", "shared_features"]


class Machine(nn.Module):
    """Products of features with mixtures of them, then a linear."""

    def __init__(self, n: int = 6, d: int = 8, k: int = 3) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.randn(n, k) / n**0.5)
        self.out = nn.Linear(n * k, 4 * d)
        self.d = d

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.y))
        return self.out(products.flatten(1)).view(-1, 4, self.d)


class Layer(nn.Module):
    """As a user writes it: a compression and a shortcut by linears over features."""

    def __init__(self, n: int = 6, d: int = 8, machine: type[Machine] = Machine) -> None:
        super().__init__()
        self.machine = machine(n, d)
        self.compress = nn.Linear(n, 2, bias=False)
        self.shortcut = nn.Linear(n, 6)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        x = self.between(x)
        shortcut = self.shortcut(x.transpose(1, 2)).transpose(1, 2)
        return torch.cat([self.machine(x), compressed], 1) + shortcut


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.tanh())
        return self.head(x.flatten(1))


def products_in(model: nn.Module, *args: Tensor) -> tuple[Tensor, int]:
    """The output of the compiled model, and how many batched products its graph has."""
    seen: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(sum(node.target is torch.ops.aten.bmm.default for node in graph.graph.nodes))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True)(*args)
    return out, sum(seen)


def pair(layer: type[nn.Module] = Layer, mods: list[str] = MODS) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(layer)
    changed = copy.deepcopy(model)
    applied = loka.mods.apply(changed, mods, example=torch.randn(5, 6, 8))
    return model, changed, applied


def test_one_pass_over_the_features_of_a_layer() -> None:
    model, changed, applied = pair()
    assert applied.sites["shared_features"] == ["layers.0", "layers.1"]
    x = torch.randn(5, 6, 8)
    out, count = products_in(changed, x)
    torch.testing.assert_close(out, model(x).detach(), rtol=1e-5, atol=1e-5)
    # in each layer: the mixtures, the products, and one product for compression and shortcut together
    assert count == 2 * 3
    _, apart = products_in(pair(mods=MODS[:2])[1], x)
    assert apart == 2 * 4


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_those_of_the_model(backend: str) -> None:
    model, changed, _ = pair()
    torch._dynamo.reset()
    compiled = torch.compile(changed, backend=backend, fullgraph=True)
    x, twin = torch.randn(5, 6, 8, requires_grad=True), None
    twin = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    compiled(twin).square().sum().backward()
    torch.testing.assert_close(twin.grad, x.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_under_autocast_everything_is_bf16() -> None:
    model, changed, _ = pair()
    x = torch.randn(5, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, count = products_in(changed, x)
    assert count == 2 * 3
    torch.testing.assert_close(out.float(), model(x).detach(), rtol=0.05, atol=0.05)


class OtherFeatures(Layer):
    """The shortcut and the machine read other features than the compression."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2


class Written(Layer):
    """Features change in place between the compression and the rest."""

    def between(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class ForeachWritten(Layer):
    """The same, in a way that no function mode sees in compiled code."""

    def between(self, x: Tensor) -> Tensor:
        torch._foreach_mul_([x], 2.0)
        return x


@pytest.mark.parametrize("layer", [OtherFeatures, Written, ForeachWritten])
def test_only_modules_that_read_the_same_features_share(layer: type[nn.Module]) -> None:
    model, changed, _ = pair(layer)
    x = torch.randn(5, 6, 8)
    out, _ = products_in(changed, x)
    torch.testing.assert_close(out, model(x).detach(), rtol=1e-5, atol=1e-5)


class Chosen(Layer):
    """In training the shortcut reads other features."""

    def between(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x


def test_another_path_than_the_examples_is_computed_apart() -> None:
    model, changed, _ = pair(Chosen)
    x = torch.randn(5, 6, 8)
    for training in (True, False):
        model.train(training), changed.train(training)
        out, _ = products_in(changed, x)
        torch.testing.assert_close(out, model(x).detach(), rtol=1e-5, atol=1e-5)


class Later(Layer):
    """In training the features change in place between the compression and the rest, in a way that no function mode sees."""

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            torch.relu_(x)
        return x


class LateMachine(Machine):
    """The same between the mixtures and their products."""

    def forward(self, x: Tensor) -> Tensor:
        mixtures = torch.einsum("bnd,nk->bdk", x, self.y)
        if self.training:
            torch.relu_(x)
        return self.out(torch.bmm(x, mixtures).flatten(1)).view(-1, 4, self.d)


class LaterInside(Layer):
    """A layer with such a machine."""

    def __init__(self) -> None:
        super().__init__(machine=LateMachine)


@pytest.mark.parametrize("layer", [Later, LaterInside])
def test_features_that_only_another_path_than_the_examples_writes_to_are_computed_apart(layer: type[nn.Module]) -> None:
    model, changed, _ = pair(layer)
    x = torch.randn(5, 6, 8)
    for training in (True, False):
        model.train(training), changed.train(training)
        out, _ = products_in(changed, x.clone())
        torch.testing.assert_close(out, model(x.clone()).detach(), rtol=1e-5, atol=1e-5)


def test_a_weight_that_a_hook_makes_is_not_read_before_the_hook_ran() -> None:
    torch.manual_seed(0)
    model = Net()

    def clip(linear: nn.Module, _: Any) -> None:
        with torch.no_grad():
            linear.weight.clamp_(-0.1, 0.1)

    for layer in model.layers:
        layer.compress.register_forward_pre_hook(clip)
    changed = copy.deepcopy(model)
    applied = loka.mods.apply(changed, MODS, example=torch.randn(5, 6, 8))
    assert "shared_features" not in applied.sites


def test_it_is_undone_copied_and_pickled() -> None:
    import io

    model, changed, _ = pair()
    x = torch.randn(5, 6, 8)
    expected, _ = products_in(changed, x)
    buffer = io.BytesIO()
    torch.save(changed, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(changed), torch.load(buffer, weights_only=False)):
        out, count = products_in(twin, x)
        assert count == 2 * 3
        assert torch.equal(out, expected)
        with torch.no_grad():
            twin.layers[0].compress.weight.zero_()  # its own, not the first model's
            assert not torch.equal(products_in(twin, x)[0], expected)
    loka.mods.revert(changed)
    assert not any(SHARED in vars(m) or "loka_groups" in vars(m) for m in changed.modules())
    assert torch.equal(changed(x), model(x))
    assert list(changed.state_dict()) == list(model.state_dict())


def test_eager_it_changes_nothing() -> None:
    _, changed, _ = pair()
    _, apart, _ = pair(mods=MODS[:2])
    x = torch.randn(5, 6, 8)
    assert torch.equal(changed(x), apart(x))


def assert_trains_as(model: nn.Module, changed: nn.Module, *, whole: bool = True) -> None:
    """The same gradients compiled, and none where the model has none: zeros would let weight decay shrink a weight."""
    torch._dynamo.reset()
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=whole)
    x = torch.randn(5, 6, 8)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    model(inputs[0]).square().sum().backward()
    compiled(inputs[1]).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(model.named_parameters(), changed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


class TransposedWithoutGradients(Layer):
    """The compression passes no gradient to the features."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            transposed = x.transpose(1, 2)
        compressed = self.compress(transposed).transpose(1, 2)
        return torch.cat([self.machine(x), compressed], 1) + self.shortcut(x.transpose(1, 2)).transpose(1, 2)


class WrittenResult(Layer):
    """What a linear returns may be written to."""

    def forward(self, x: Tensor) -> Tensor:
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2).mul_(2)
        return torch.cat([self.machine(x), compressed], 1) + self.shortcut(x.transpose(1, 2)).transpose(1, 2)


class Skipped(Layer):
    """Training leaves the shortcut out."""

    def forward(self, x: Tensor) -> Tensor:
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        shortcut = x if self.training else self.shortcut(x.transpose(1, 2)).transpose(1, 2)
        return torch.cat([self.machine(x), compressed], 1) + shortcut


class Frozen(Layer):
    """The compression is computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x.transpose(1, 2)).transpose(1, 2)
        with torch.no_grad():
            compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        return torch.cat([self.machine(x), compressed], 1) + shortcut


class Detached(Layer):
    """The compression's gradient is cut off."""

    def forward(self, x: Tensor) -> Tensor:
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2).detach()
        return torch.cat([self.machine(x), compressed], 1) + self.shortcut(x.transpose(1, 2)).transpose(1, 2)


class Checkpointed(Layer):
    """The compression is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        compressed = checkpoint(self.compress, x.transpose(1, 2), use_reentrant=False).transpose(1, 2)
        return torch.cat([self.machine(x), compressed], 1) + self.shortcut(x.transpose(1, 2)).transpose(1, 2)


class TransposedMachine(Machine):
    """The mixtures pass no gradient to the features."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            transposed = x.transpose(1, 2)
        return self.out(torch.bmm(x, transposed @ self.y).flatten(1)).view(-1, 4, self.d)


class TransposesInside(Layer):
    def __init__(self) -> None:
        super().__init__(machine=TransposedMachine)


@pytest.mark.parametrize("layer", [TransposedWithoutGradients, WrittenResult, Skipped, Frozen, Detached, Checkpointed, TransposesInside])  # fmt: skip
def test_gradients_go_where_the_model_lets_them(layer: type[nn.Module]) -> None:
    model, changed, _ = pair(layer)
    assert_trains_as(model, changed)


class CheckpointedNet(Net):
    """A checkpoint around each layer, as training with little memory has it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.tanh(), use_reentrant=False)
        return self.head(x.flatten(1))


def test_checkpointed_layers_share() -> None:
    torch.manual_seed(0)
    model = CheckpointedNet()
    changed = copy.deepcopy(model)
    applied = loka.mods.apply(changed, MODS, example=torch.randn(5, 6, 8))
    assert applied.sites["shared_features"] == ["layers.0", "layers.1"]
    assert_trains_as(model, changed, whole=False)  # no function mode can be entered inside a compiled checkpoint


def test_results_that_training_leaves_out_are_shared_in_inference() -> None:
    _, changed, _ = pair(Skipped)
    assert products_in(changed.eval(), torch.randn(5, 6, 8))[1] == 2 * 3


def test_a_weight_that_a_later_hook_makes_is_not_read_before_the_hook_ran() -> None:
    model, changed, _ = pair()
    for both in (model, changed):
        for layer in both.layers:
            layer.shortcut.register_forward_pre_hook(_halve)
    assert_trains_as(model, changed)


def _halve(linear: nn.Module, _: Any) -> None:
    linear.weight.data = linear.weight.data / 2  # which no function mode sees in compiled code


def test_a_module_that_was_replaced_may_stay_behind_on_another_device() -> None:
    model, changed, _ = pair()
    for both in (model, changed):
        torch.manual_seed(1)
        left = both.layers[0].compress
        both.layers[0].compress = nn.Linear(6, 2)
        left.to("meta")
    assert_trains_as(model, changed)


def test_applied_twice_it_changes_nothing_more() -> None:
    model, changed, _ = pair()
    assert "shared_features" not in loka.mods.apply(changed, MODS, example=torch.randn(5, 6, 8)).sites
    assert_trains_as(model, changed)
    loka.mods.revert(changed)
    assert not any(SHARED in vars(m) or "loka_groups" in vars(m) for m in changed.modules())


def test_on_the_meta_device() -> None:
    changed = pair()[1].to("meta")
    assert products_in(changed, torch.empty(5, 6, 8, device="meta"))[0].shape == (5, 1)
