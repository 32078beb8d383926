"""Chains are found by what an example shows, however the model is written; what ends one is said; and what is found can be placed and is the model up to FP8."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.lowp.emulated import emulate
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from foreign_zoo import ZOO
from loka.lowp import chain_scales, chains_of
from loka.models import build
from loka.nn import BlockNorm
from loka.units import discover, place
from loka.units.magnitudes import measuring

EXPECTED = {
    "dlrm": [["dense.2", "dense.4"], ["over.0", "over.2", "over.4"]],
    "tower": [["net.0", "net.3", "net.6"]],
    "cross": [["deep1", "deep2"]],
    "encoder": [[f"encoder.layers.{i}.linear1", f"encoder.layers.{i}.linear2"] for i in range(2)],
    "auxiliary": [["first"], ["second"]],
}


FIRST, LATER = (
    0.02,
    0.3,
)  # of gradients: values on the edge of two FP8 numbers; scales of their own that round every value apart


def names(found) -> list[list[str]]:
    return [unit.linears for unit in found.units]


@pytest.mark.parametrize("name", ZOO)
def test_models_that_know_nothing_of_this_package(name: str) -> None:
    make, inputs = ZOO[name]
    model, example = make(), inputs(8)
    found = discover(model, example)
    assert names(found) == EXPECTED[name]
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {n for unit in found.units for n in unit.linears} | found.alone.keys() == linears
    assert found.ends.keys() == {unit.linears[-1] for unit in found.units}
    assert all(found.alone.values())
    assert str(found).count("\n") + 1 == len(found.units) + len(found.alone)


@pytest.mark.parametrize("name", ZOO)
def test_what_is_found_is_the_model_in_fp8_forward_and_backward(name: str) -> None:
    """The first step finds every scale from its tensor, so an emulation gives the same but for values on the edge between two FP8 numbers; later steps scale by what was seen before."""
    make, inputs = ZOO[name]
    model, batch = make(), inputs(32)
    twin = copy.deepcopy(model)
    found = discover(model, batch).units
    for unit in found:
        place(model, unit)
    emulate(twin, [linear for unit in found for linear in unit.linears])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, bound in enumerate((FIRST, LATER)):
        for one in (model, twin):
            one.zero_grad()
            one(*batch).square().sum().backward()
        got, wanted = model(*batch), twin(*batch)
        assert (got - wanted).norm() < 0.2 * bound * wanted.norm(), step
        for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert a.grad is not None, key
            if b.grad.norm() > 1e-4:
                assert (a.grad - b.grad).norm() < bound * b.grad.norm(), (key, step)
        optimizer.step()
    with torch.no_grad():
        assert (model.eval()(*batch) - twin.eval()(*batch)).norm() < 0.1 * twin(*batch).norm()


class Net(nn.Module):
    """Three wide linears and a prediction layer, joined by what a test wants."""

    def __init__(self, forward, **parts: object) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.act, self.act2 = nn.ReLU(), nn.SiLU()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def straight(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.act2(m.b(m.act(m.a(x))))))


def find(forward, *, before=lambda model: None, serving: bool = False, rows: int = 8, **parts):
    model = Net(forward, **parts)
    before(model)
    return discover(model, torch.randn(rows, 64), serving=serving)


def _two_readers(m: Net, x: Tensor) -> Tensor:
    h = m.act(m.a(x))
    return m.last(m.c(m.b(h)) + h.mean(-1, keepdim=True))


def _twice(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.c(m.b(m.act(m.a(x))))))


def _functional(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(F.relu(m.b(m.act(m.a(x))))))


def _kept(m: Net, x: Tensor) -> Tensor:
    h = m.act(m.a(x))
    m.hidden = h  # a loss reads it later
    return m.last(m.c(m.act2(m.b(h))))


KEPT: list[Tensor] = []


def _kept_elsewhere(m: Net, x: Tensor) -> Tensor:
    KEPT[:] = [m.act(m.a(x))]
    return m.last(m.c(m.act2(m.b(KEPT[0]))))


def _returned_in_an_object(m: Net, x: Tensor) -> object:
    h = m.act(m.a(x))
    return SimpleNamespace(hidden=h, logit=m.last(m.c(m.act2(m.b(h)))))


def _in_a_cycle(m: Net, x: Tensor) -> Tensor:
    h = m.act(m.a(x))

    def then(times: int) -> Tensor:  # refers to itself, and to h: nobody has either, but only the collector frees them
        return then(times - 1) if times else m.b(h)

    return m.last(m.c(m.act2(then(1))))


def _weight_read(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.b(m.act(m.a(x))))) + m.b.weight.sum() * 0


def _weight_clipped(m: Net, x: Tensor) -> Tensor:
    h = m.act(m.a(x))
    m.b.weight.data.clamp_(-0.01, 0.01)
    return m.last(m.c(m.b(h)))


def _gain_set(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    m.act.weight.data.fill_(0.5)
    return m.last(m.c(m.b(m.act(h))))


def _autocast_within(m: Net, x: Tensor) -> Tensor:
    h = m.act(m.a(x))
    with torch.autocast("cpu", torch.bfloat16):
        return m.last(m.c(m.b(h)))


def _name_again(model: Net) -> None:
    model.layers = nn.ModuleList([model.a, model.act, model.b])


def _shared_activation(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.act(m.b(m.act(m.a(x))))))


def _shared_function(m: Net, x: Tensor) -> Tensor:
    return m.last(m.function(m.c(m.b(m.function(m.a(x))))))


def _function(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.b(m.function(m.a(x)))))


def _added(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.act2(m.b(m.act(m.a(x))) + 1)))


def _tie(model: Net) -> None:
    model.twin = nn.Linear(96, 64)
    model.twin.weight = model.b.weight


def _hook(name: str):
    return lambda model: model.get_submodule(name).register_forward_hook(lambda module, inputs, output: None)


def _protect(model: Net) -> None:
    model.b.loka_protected = "by hand"


@pytest.mark.parametrize(
    ("forward", "options", "chains", "why"),
    [
        (straight, {}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_two_readers, {}, [["a"], ["b", "c"]], "its output is read by 2 operations"),
        (_twice, {}, [["a", "b"]], "c: it is called 2 times"),
        (_functional, {}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_kept, {}, [["a"], ["b", "c"]], "it is a result of the model"),
        (_kept_elsewhere, {}, [["a"], ["b", "c"]], "it is a result of the model"),
        (_in_a_cycle, {}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_returned_in_an_object, {}, [["a"], ["b", "c"]], "it is a result of the model"),
        (_returned_in_an_object, {"last": nn.Linear(64, 64)}, [["a"], ["b", "c"]], "last: it is a prediction layer"),
        (_weight_read, {}, [["a"]], "b: its weight is read elsewhere too"),
        (_weight_clipped, {}, [["a"]], "b: its weight is read elsewhere too"),
        (_weight_clipped, {"before": _name_again}, [["a"]], "b: its weight is read elsewhere too"),
        (_autocast_within, {}, [["a"], ["b", "c"]], "autocast begins or ends between them"),
        (_gain_set, {"act": nn.LayerNorm(96)}, [["b", "c"]], "the weight of act is read elsewhere too"),
        (_shared_activation, {}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_function, {"function": F.relu}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_shared_function, {"function": F.relu}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (_added, {}, [["a", "b"]], "add in the model follows it"),
        (straight, {"before": _tie}, [["a"]], "b: it shares its weight"),
        (straight, {"before": _hook("b")}, [["a"]], "b: it has hooks that would see other tensors"),
        (straight, {"before": _hook("act2")}, [["a", "b"]], "act2 has hooks that would see other tensors"),
        (straight, {"before": _protect}, [["a"]], "b: protected: by hand"),
        (straight, {"b": nn.Linear(96, 32), "c": nn.Linear(32, 64)}, [["a"]], "b: 96 x 32: narrower than 64"),
        (straight, {"act": nn.Dropout(0.5)}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (straight, {"act": nn.Dropout(1.0)}, [["b", "c"]], "act is a dropout with p 1, which zeroes everything"),
        (straight, {"act": nn.Dropout(0.0)}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (straight, {"act": nn.Dropout(0.5), "serving": True}, [["a", "b", "c"]], "last: it is a prediction layer"),
        (straight, {"act": nn.Softmax(-1)}, [["b", "c"]], "act (Softmax) follows it"),
        (straight, {"act": nn.BatchNorm1d(96)}, [["b", "c"]], "act (BatchNorm1d) normalizes by the batch in training"),
        (straight, {"act": nn.LayerNorm([96])}, [["a", "b", "c"]], "last: it is a prediction layer"),
    ],
)  # fmt: skip
def test_what_ends_a_chain(forward, options: dict, chains: list[list[str]], why: str) -> None:
    found = find(forward, **options)
    assert names(found) == chains
    assert any(why in text for text in [*found.ends.values(), *found.alone.values()]), str(found)


def _drop(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.act2(F.dropout(m.b(m.act(m.a(x))), 0.5, m.training))))


def test_a_functional_dropout_ends_a_chain_in_training_and_not_in_serving() -> None:
    found = find(_drop)
    assert names(found) == [["a", "b"]]
    assert found.ends["b"].startswith("in training: ")
    assert names(find(_drop, serving=True)) == [["a", "b", "c"]]


def _norm_drop(m: Net, x: Tensor) -> Tensor:
    return m.last(m.c(m.act2(m.b(m.act(m.a(F.dropout(m.norm(x), 0.5, m.training)))))))


def test_a_dropout_behind_a_block_norm_bounds_nothing_in_training() -> None:
    """It divides by 1 - p: values beyond 16 would saturate at the static scale."""
    assert not find(_norm_drop, norm=BlockNorm(64)).units[0].bounded_input
    assert find(_norm_drop, norm=BlockNorm(64), serving=True).units[0].bounded_input


def test_a_container_that_somebody_watches_ends_a_chain() -> None:
    """Its hook would see what the whole chain makes, not what the container does."""

    def blocks() -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.Linear(64, 96), nn.ReLU()), nn.Sequential(nn.Linear(96, 64), nn.ReLU()), nn.Linear(64, 1)
        )

    x = torch.randn(8, 64)
    assert names(discover(blocks(), x)) == [["0.0", "1.0"]]
    model = blocks()
    seen: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    found = discover(model, x)
    assert names(found) == [["0.0"], ["1.0"]]
    assert "0 has hooks" in found.ends["0.0"]
    for unit in found.units:
        place(model, unit)
    seen.clear()
    model(x)
    assert seen[0] == (8, 96)
    model = blocks()
    model.register_forward_hook(lambda module, inputs, output: None)
    assert names(discover(model, x)) == [["0.0", "1.0"]], "a hook on all of it sees what it saw"


def test_hooks_of_all_modules_end_every_chain_and_are_named_where_they_come_later() -> None:
    model, x = Net(straight), torch.randn(8, 64)
    unit = discover(model, x).units[0]
    with FlopCounterMode(display=False):
        found = discover(model, x)
        assert not found.units
        assert "a" in found.by_themselves
    place(model, unit)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="registered for all modules at once"):
        model(x)
    assert model(x).shape == (8, 1)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_a_module_that_come_later_are_named(register: str) -> None:
    model, x = Net(straight), torch.randn(8, 64)
    place(model, discover(model, x).units[0])
    hook = getattr(model.a, register)(lambda module, given, made: made[0].sum())
    with pytest.raises(RuntimeError, match="a, or a module after it, was given hooks"):
        model(x)
    hook.remove()
    assert model(x).shape == (8, 1)


def test_names_are_those_of_the_plain_model() -> None:
    make, inputs = ZOO["dlrm"]
    plain, x = make(), inputs(8)
    expected = discover(plain, x).units
    assert discover(torch.compile(plain, backend="eager"), x).units == expected
    inside = make()
    inside.over = checkpoint_wrapper(inside.over)
    assert discover(inside, x).units == expected
    for unit in expected:
        place(inside, unit)
    assert len(list(chains_of(inside))) == 2
    inside(*x).sum().backward()


@pytest.mark.parametrize("order", ["norm first", "activation first"])
def test_a_norm_stands_before_the_activation(order: str) -> None:
    parts = (nn.LayerNorm(96), nn.ReLU()) if order == "norm first" else (nn.ReLU(), nn.LayerNorm(96))
    model = nn.Sequential(nn.Linear(64, 96), *parts, nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
    found = discover(model, torch.randn(4, 64))
    assert names(found) == ([["0", "3"]] if order == "norm first" else [["0"], ["3"]])


def test_nothing_is_changed_and_a_failure_is_said() -> None:
    make, inputs = ZOO["tower"]
    model = make().train()
    state = copy.deepcopy(model.state_dict())
    discover(model, inputs(4))
    assert model.training
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match=r"units of Tower cannot be found: .*mat1 and mat2"):
        discover(model, torch.randn(4, 81))
    with pytest.raises(ValueError, match="no example was given"):
        discover(model)


def test_linears_that_stand_alone_are_units_where_they_are_wide_enough() -> None:
    model, x = ZOO["cross"][0](), ZOO["cross"][1](8)
    assert names(discover(model, x, linears=96)) == [["cross.0"], ["cross.1"], ["deep1", "deep2"]]
    assert names(discover(model, x, linears=97)) == EXPECTED["cross"]
    assert names(discover(model, x, module_filter_fn=lambda module, name: name != "deep2")) == [["deep1"]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_of_this_package_need_no_example(device: str) -> None:
    with torch.device(device):
        model = build("wukong", "tiny", tower_norm="block", norm="block")
    inputs = torch.ones(4, model.config.n, model.config.d, device=device)
    assert names(discover(model, narrow=16)) == names(discover(model, inputs, narrow=16)) != []


def test_a_linear_that_is_run_without_a_call_of_it_is_told_from_one_that_is_not_run() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.passed_by, self.idle = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.passed_by.forward(torch.tanh(self.called(x)))

    alone = discover(Direct(), torch.ones(4, 64)).alone
    assert "module(x), not module.forward(x)" in alone["passed_by"]
    assert alone["idle"].startswith("it was not called")


def test_where_a_kernel_makes_a_gradient_its_scale_is_remembered() -> None:
    """One linear with its activation: the second step scales its gradient by the first one's, and saturates what is larger; a linear alone scales by the gradient itself."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.SiLU()), torch.randn(16, 64)
    (unit,) = discover(model, x, linears=64).units
    assert (unit.linears, unit.scales, unit.gradient) == (["0"], "dynamic", "delayed")
    cross = discover(ZOO["cross"][0](), ZOO["cross"][1](8), linears=96).units
    assert [unit.gradient for unit in cross] == ["tensor", "tensor", "delayed"]
    chain = place(model, unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes = []
    for factor in (1.0, 1.0, 1000.0, 1000.0):
        optimizer.zero_grad()
        (factor * model(x).sum()).backward()
        sizes.append(float(model[0].weight.grad.norm()) / factor)
        optimizer.step()
        assert chain.gradients_primed
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    assert sizes[2] < 0.01 * sizes[0]  # a thousandfold gradient has the scale of the step before
    assert sizes[3] == pytest.approx(sizes[0], rel=0.02)
    assert int(chain.grad[0].saturated) == 1


def test_scales_follow_where_no_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the user updates by hand: magnitudes of a plan would stay in force for ever, and gradients that have grown since would saturate unseen."""
    monkeypatch.setattr(chain_scales, "UNFILED", 4)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.SiLU()), torch.randn(16, 64)
    with measuring(model, discover(model, x, linears=64).units) as seen:
        model(x).sum().backward()
    chain = place(model, seen.units()[0])
    sizes = []

    def train(steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            (1000.0 * model(x).sum()).backward()
            sizes.append(float(model[0].weight.grad.norm()))

    with pytest.warns(UserWarning, match=r"without a torch optimizer step.*loka\.refresh") as told:
        train(10)
    assert len(told) == 1
    assert sizes[0] < 0.01 * sizes[-1]
    assert sizes[4] == pytest.approx(sizes[-1], rel=0.02)
    assert int(chain.grad[0].saturated) == 1


def test_a_chain_that_no_gradient_reaches_does_not_wait_for_the_device_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)), torch.randn(16, 64)
    (unit,) = discover(model, x, linears=64).units
    chain = place(model, unit)
    asked = []
    find = type(chain).find_primed
    monkeypatch.setattr(type(chain), "find_primed", lambda self: asked.append(1) or find(self))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(100):
        model[2](model[1](model[0](x)).detach()).sum().backward()
        optimizer.step()
    assert len(asked) < 16
    assert not chain.gradients_primed
    for _ in range(30):
        model(x).sum().backward()
        optimizer.step()
    assert chain.gradients_primed


class Tower(nn.Module):
    """Two linears behind what may require gradients, or take some."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        with torch.inference_mode(how == "inference"):
            self.a, self.b, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.scale = nn.Parameter(torch.ones(()))
        if how == "hook":
            self.register_forward_pre_hook(lambda module, args: (args[0].clone().requires_grad_(),))
        if how == "made":
            self.a._parameters["bias"] = self.scale * torch.ones(64)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "asks" and not self.a.weight.requires_grad:
            return self.last(x)
        if self.how == "inner":
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.scale.square(), [self.scale])
            x = x - slope
        return self.last(F.relu(self.b(F.relu(self.a(x)))))


@pytest.mark.parametrize("how", ["input", "hook", "made", "asks", "inner", "inference"])
def test_what_requires_gradients_is_left_so_and_changes_no_chain(how: str) -> None:
    model, x = Tower(how), torch.randn(8, 64, requires_grad=how == "input")
    before = [p.requires_grad for p in model.parameters()]
    assert names(discover(model, x)) == [["a", "b"]]
    assert [p.requires_grad for p in model.parameters()] == before
