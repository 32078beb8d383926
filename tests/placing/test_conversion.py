"""Conversion swaps modules and nothing else; reverting puts everything back."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.lowp.linear import Linear
from loka.nn import GroupedLinear
from loka.placing import LinearOptions, convert, revert, scale_state
from loka.probe import Probe
from loka.records import Plan


class Tower(nn.Module):
    """Two linears, one of them under two names, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
        self.again = self.body[2]
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.again(torch.tanh(self.body(x)))))
        return out


@pytest.fixture
def model() -> Tower:
    torch.manual_seed(0)
    return Tower()


def plan_for(model: nn.Module, **options: object) -> Plan:
    probe = Probe(model, every=1, rows=64)
    model(torch.randn(64, 16)).square().mean().backward()
    model.zero_grad(set_to_none=True)
    probe.step()
    probe.detach()
    options = {"max_error": 1.0, "max_gradient_error": 1.0, **options}
    return probe.evaluate(["rowwise"], samples=2).plan(min_speedup=None, **options)  # type: ignore[arg-type]


def test_the_state_dict_does_not_change(model: Tower) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    summary = convert(model, plan_for(model))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert set(summary.converted) == {"body.0", "body.2", "head"}
    assert summary.low_precision_share == pytest.approx(1.0)
    assert isinstance(model.body[0], Linear)


def test_it_computes_in_low_precision_forward_and_backward(model: Tower) -> None:
    x = torch.randn(64, 16, requires_grad=True)
    exact = model(x)
    (exact_grad,) = torch.autograd.grad(exact.sum(), x)
    convert(model, plan_for(model))
    low = model(x)
    (low_grad,) = torch.autograd.grad(low.sum(), x)
    assert not torch.equal(low, exact)
    assert not torch.equal(low_grad, exact_grad)
    assert float((low - exact).detach().norm() / exact.detach().norm()) < 0.1
    assert float((low_grad - exact_grad).norm() / exact_grad.norm()) < 0.2


def test_a_module_under_two_names_stays_one_module(model: Tower) -> None:
    convert(model, plan_for(model))
    assert model.again is model.body[2]
    assert isinstance(model.again, Linear)


def test_reverting_restores_the_results(model: Tower) -> None:
    x = torch.randn(8, 16)
    exact = model(x)
    convert(model, recipe="tensorwise")
    assert revert(model) == 3
    assert type(model.body[0]) is nn.Linear
    assert model.again is model.body[2]
    assert torch.equal(model(x), exact)
    assert revert(model) == 0


@pytest.mark.parametrize("scales", ["dynamic", "delayed"])
def test_an_optimizer_outlives_a_conversion(model: Tower, scales: str) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        convert(model, recipe="tensorwise", options=LinearOptions(scales=scales))  # type: ignore[arg-type]
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
        revert(model)
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()


def test_kept_sites_say_why(model: Tower) -> None:
    summary = convert(model, plan_for(model, overrides={"head": "high"}))
    assert list(summary.kept) == ["head"]
    assert "override" in summary.kept["head"]
    assert type(model.head) is nn.Linear
    assert summary.low_precision_share is not None
    assert summary.low_precision_share < 1
    assert "2 of 3 linears converted" in str(summary)
    assert "kept head" in str(summary)


def test_sites_the_plan_does_not_know_are_kept(model: Tower) -> None:
    plan = plan_for(model)
    summary = convert(model, msgspec.structs.replace(plan, sites=plan.sites[:1]))
    assert summary.kept == {"body.2": "not in the plan", "head": "not in the plan"}


def test_a_plan_that_does_not_fit_changes_nothing_and_names_everything(model: Tower) -> None:
    plan = plan_for(model)
    other = nn.Sequential(nn.Linear(16, 32))
    with pytest.raises(ValueError, match="does not fit") as caught:
        convert(other, plan)
    assert str(caught.value).count("\n") == 3
    assert type(other[0]) is nn.Linear


def test_a_recipe_with_a_filter(model: Tower) -> None:
    summary = convert(model, recipe="blockwise", module_filter_fn=lambda module, name: name != "head")
    assert set(summary.converted) == {"body.0", "body.2"}
    assert summary.low_precision_share is None
    assert "1x128" in summary.converted["body.0"]


def test_training_mode_is_kept(model: Tower) -> None:
    model.eval()
    convert(model, recipe="rowwise")
    assert not model.head.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"recipe": "fastest"}, "no recipe 'fastest'"),
        ({"plan": "rowwise"}, "expected a loka.records.Plan, got str 'rowwise'; hint: recipe='rowwise'"),
        ({"plan": "plan.json"}, r"hint: loka\.Plan\.load\(path\)"),
        ({"plan": {"a": 1}}, "expected a loka.records.Plan, got dict"),
        ({"recipe": "rowwise", "options": {"scales": "delayed"}}, "options: expected LinearOptions, got dict"),
    ],
)
def test_requests_that_make_no_sense(model: Tower, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments)  # type: ignore[arg-type]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an nn\.Module, got str"):
        convert("model", recipe="rowwise")  # type: ignore[arg-type]


def test_a_bare_linear_is_converted_in_place() -> None:
    plain = nn.Linear(4, 4)
    summary = convert(plain, recipe="rowwise")
    assert list(summary.converted) == [""]
    assert isinstance(plain, Linear)
    assert revert(plain) == 1
    assert type(plain) is nn.Linear


def test_a_converted_model_and_contradicting_requests_are_refused(model: Tower) -> None:
    plan = plan_for(model)
    convert(model, plan)
    with pytest.raises(ValueError, match="already converted"):
        convert(model, plan)
    revert(model)
    with pytest.raises(ValueError, match="module_filter_fn cannot be combined with a plan"):
        convert(model, plan, module_filter_fn=lambda *_: True)
    with pytest.raises(ValueError, match="cannot be combined with a plan, which sets both"):
        convert(model, plan, options=LinearOptions(scales="delayed"))


class Scaled(nn.Linear):
    """A subclass without a forward of its own."""

    def norm(self) -> float:
        return float(self.weight.detach().norm())


class LoRA(nn.Module):
    """A frozen linear beside a trained pair."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class LoRALinear(nn.Linear):
    """The other way to write it."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Zoo(nn.Module):
    """Everything that is a linear, more or less."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled, self.lora, self.own = nn.Linear(16, 16), Scaled(16, 16), LoRA(), LoRALinear(16, 16)
        self.parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.double = nn.Linear(16, 16, dtype=torch.float64)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.experts = GroupedLinear(2, 16, 16)
        self.lazy = nn.LazyLinear(16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.plain.weight


def test_every_kind_of_linear_has_a_defined_fate() -> None:
    zoo = Zoo()
    references = [zoo.plain, zoo.scaled]
    summary = convert(zoo, recipe="rowwise")
    assert set(summary.converted) == {"plain", "scaled", "lora.base", "lora.down", "lora.up", "tied"}
    why = {
        "own": "forward of its own",
        "parametrised": "parametrised weights",
        "double": "float64",
        "attention.out_proj": "without calling it",
        "experts": "grouped GEMMs",
        "lazy": "not initialized",
    }
    assert set(summary.kept) == set(why)
    for name, words in why.items():
        assert words in summary.kept[name], name
    assert [zoo.plain, zoo.scaled] == references  # converted in place: whoever holds a module holds it still
    assert isinstance(zoo.scaled, Scaled)
    assert zoo.scaled.norm() > 0
    assert zoo.tied.weight is zoo.plain.weight
    assert revert(zoo) == 6
    assert type(zoo.scaled) is Scaled
    assert type(zoo.plain) is nn.Linear


def test_a_plan_for_a_linear_that_cannot_be_converted_is_refused(model: Tower) -> None:
    plan = plan_for(model)
    parametrize.register_parametrization(model.head, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"head: has parametrised weights"):
        convert(model, plan)
    assert type(model.body[0]) is nn.Linear


def test_lora_trains_the_pair_and_leaves_the_base(model: Tower) -> None:
    lora = LoRA()
    convert(lora, recipe="rowwise")
    lora(torch.randn(4, 16)).sum().backward()
    assert lora.base.weight.grad is None
    assert lora.up.weight.grad is not None
    assert lora.down.weight.grad is not None


def test_an_example_tells_the_share_and_leaves_no_trace(model: Tower) -> None:
    model.register_buffer("calls", torch.zeros(()))

    def count(module: nn.Module, *_: object) -> None:
        module.calls.add_(1)
        torch.rand(1)

    model.register_forward_hook(count)
    example, state = torch.randn(8, 16), torch.get_rng_state()
    summary = convert(model, recipe="tensorwise", module_filter_fn=lambda _, name: name != "head", example=example)
    # per row: body.0 has fprop and wgrad (its input needs no gradient), body.2 runs twice, the head is kept
    body, again, head = 2 * 16 * 32 * 2, 2 * 2 * 32 * 32 * 3, 2 * 32 * 3
    assert summary.low_precision_share == pytest.approx((body + again) / (body + again + head))
    assert summary.flops_of == "model"
    assert model.head.weight.grad is None
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("place", [lambda m: convert(m, recipe="rowwise"), lambda m: loka.quantize(m, "rowwise")], ids=["convert", "quantize"])  # fmt: skip
def test_a_weight_that_changes_when_it_is_read_is_not_read(place: Callable[[nn.Module], object]) -> None:
    """In training a spectral norm takes a step of its power iteration with every look at the weight."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16), normed)
    before = {name: value.clone() for name, value in normed.state_dict().items()}
    place(model)
    after = normed.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Remembering(nn.Module):
    """Puts a new tensor in the place of a buffer, and computes its linear again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return checkpoint(self.linear, x - self.mean, use_reentrant=True)


def test_an_example_leaves_no_trace_in_buffers_that_are_replaced_nor_in_gradients() -> None:
    model, x = Remembering(), torch.randn(4, 16, requires_grad=True)
    mean, model.linear.weight.grad = model.mean, torch.ones(8, 16)
    assert convert(model, recipe="rowwise", example=x).low_precision_share == pytest.approx(1.0)
    assert model.mean is mean
    assert not mean.any()
    assert model.linear.bias.grad is None
    assert bool((model.linear.weight.grad == 1).all())


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_examples_of_several_arguments(form: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"out": self.a(x) + self.b(y)}

    x, y = torch.randn(4, 16), torch.randn(4, 16)
    example = (x, y) if form == "tuple" else {"x": x, "y": y}
    assert convert(Two(), recipe="rowwise", example=example).low_precision_share == 1.0
    half = convert(Two().eval(), recipe="rowwise", module_filter_fn=lambda _, n: n == "a", example=example)
    assert half.low_precision_share == 0.5


def test_a_failing_conversion_changes_nothing(model: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Linear._allocate, []

    def failing(self: Linear) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        real(self)

    monkeypatch.setattr(Linear, "_allocate", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        convert(model, recipe="rowwise")
    assert all(type(m) is nn.Linear for m in (model.body[0], model.body[2], model.head))


def test_loka_convert_is_always_callable() -> None:
    """No room may hide the function, whoever is imported first."""
    first = "import loka.demo\nfrom loka.placing import revert"
    code = (
        f"{first}\nimport loka, torch\nm = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "for _ in range(2):\n    loka.convert(m, recipe='rowwise'); loka.revert(m)\nprint('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_public_names_resolve() -> None:
    for name in loka.__all__:
        assert getattr(loka, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loka.nothing


def test_protected_linears_are_left_alone_and_fused_ones_are_converted_already() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    model[3].loka_protected = True
    summary = loka.convert(model, recipe="rowwise")
    assert list(summary.converted) == ["0", "2", "4"]
    assert "protected" in summary.kept["3"]
    assert type(model[3]) is nn.Linear
    loka.revert(model)
    loka.mods.apply(model, loka.mods.Fuse(), example=torch.randn(4, 64))
    with pytest.raises(ValueError, match=r"already converted: 0; call loka\.revert"):
        loka.convert(model, recipe="rowwise")


def test_an_interrupted_calibration_leaves_the_scales_of_the_last_whole_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = 20 * torch.randn(64, 32)
    exact = model(x)
    convert(model, recipe="tensorwise", options=LinearOptions(scales="static"))
    with loka.placing.calibrating(model):
        model(x)
    calibrated, state = model(x), scale_state(model)
    assert float((calibrated - exact).detach().norm() / exact.detach().norm()) < 0.1

    def half_of_it(error: BaseException) -> None:
        model(x * 1e-3)
        raise error

    for error in (RuntimeError("data loader died"), KeyboardInterrupt()):
        with pytest.raises(type(error)), loka.placing.calibrating(model):
            half_of_it(error)
        assert torch.equal(model(x), calibrated)
    with pytest.raises(ValueError, match="saw no finite value"), loka.placing.calibrating(model):
        model[0](torch.zeros(4, 32))
    assert torch.equal(model(x), calibrated)
    assert all(torch.equal(scale_state(model)[name], tensor) for name, tensor in state.items() if "static" in name)


def test_an_interrupted_first_calibration_is_none() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, recipe="tensorwise", options=LinearOptions(scales="static"))

    def half_of_it() -> None:
        model(torch.randn(4, 32))
        raise RuntimeError("data loader died")

    with pytest.raises(RuntimeError), loka.placing.calibrating(model):
        half_of_it()
    with pytest.raises(ValueError, match="not calibrated"):
        model(torch.randn(4, 32))


@pytest.mark.parametrize(
    "call",
    [
        loka.Probe,
        loka.Guard,
        loka.revert,
        loka.quantize,
        loka.scale_state,
        lambda model: loka.export(model, torch.ones(2), "a.pt2"),
        lambda model: loka.mods.apply(model, ["no_bias"]),
        lambda model: loka.placing.plan_everything(model, torch.ones(2)),
    ],
)
def test_every_front_door_refuses_what_is_no_module(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"^model is str, expected an nn\.Module$"):
        call("model.pt")
