"""A plan with units: saved, loaded, placed whole, trained on, taken back; copied and wrapped meanwhile; refused where it does not fit."""

import copy
import io
import pickle
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import loka
from foreign_zoo import ZOO
from loka import models, mods
from loka.dispatch.recipe import choice_of, recipe_named
from loka.kernels.scaled_mm import scaled_mm
from loka.lowp import chain_of, chains_of
from loka.lowp.chain_handing import AnotherPathError
from loka.lowp.interaction import interactions_of
from loka.placing import calibrating, freeze_model, load_scale_state, plan_everything, scale_state
from loka.records import GEMMS, LinkPlan, Plan, SitePlan, UnitPlan

change = msgspec.structs.replace


def make(name: str = "dlrm") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    build, inputs = ZOO[name]
    return build(), inputs(16)


def converted(name: str = "dlrm", **options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, x = make(name)
    loka.convert(model, plan_everything(model, x, **options))
    return model, x


def step(model: nn.Module, x: tuple[Tensor, ...], optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(*x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def placed(model: nn.Module) -> list[tuple]:
    """What runs in which chain, with which scales."""
    around = {name for name, _ in interactions_of(model)}
    return [
        (name, chain.links, chain.precision, chain.bounded_input, [s is None for s in chain.out], [float(s.scale) for s in chain.remembered], around)
        for name, chain in chains_of(model)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_plan_save_load_convert_train_revert(name: str, tmp_path) -> None:
    model, x = make(name)
    twin = copy.deepcopy(model)
    plan = Plan.load(plan_everything(model, x).save(tmp_path / "plan.json"))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    kinds, keys = {n: type(m) for n, m in modules.items()}, list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # made before
    done = loka.convert(model, plan, example=x)
    assert done.units == plan.units
    assert {n for unit in plan.units for n in unit.linears} <= done.converted.keys()
    assert done.converted.keys().isdisjoint(done.kept)
    assert 0 < done.low_precision_share <= 1
    assert f"in {len(plan.units)} chain" in str(done)
    assert [(n, p.data_ptr()) for n, p in model.named_parameters()] == [
        (n, p.data_ptr()) for n, p in parameters.items()
    ]
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    loka.revert(model)
    assert torch.equal(model.eval()(*x), twin.eval()(*x)), "converting and taking it back is nothing"
    model.train()
    loka.convert(model, plan)
    losses = [step(model, x, optimizer) for _ in range(6)]
    assert losses[-1] < losses[0]
    trained = copy.deepcopy(model.state_dict())
    assert any(not torch.equal(trained[k], v) for k, v in twin.state_dict().items())
    assert loka.revert(model) == sum(len(unit.links) for unit in plan.units)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert all(modules[n] is m for n, m in model.named_modules())
    assert all(parameters[n] is p for n, p in model.named_parameters())
    twin.load_state_dict(trained)
    assert torch.equal(model.eval()(*x), twin(*x)), "what was trained stays"
    step(model.train(), x, optimizer)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["dlrm", "encoder", "tower"])
def test_copies_while_converted(name: str, how: str) -> None:
    model, x = converted(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, x, optimizer)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert placed(twin) == placed(model)
    assert torch.equal(twin(*x), model(*x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert model(*x).any()
    step(twin, x, torch.optim.SGD(twin.parameters(), lr=0.1))  # its chains are its own
    loka.revert(twin)
    assert not list(chains_of(twin))
    assert list(chains_of(model))
    model(*x)


def test_state_dicts_and_scales_survive_a_restart() -> None:
    model, x = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        step(model, x, optimizer)
    again, _ = converted()
    again.load_state_dict(model.state_dict())
    assert not torch.equal(again(*x), model(*x)), "without its scales the first step finds them anew"
    load_scale_state(again, scale_state(model))
    assert torch.equal(again(*x), model(*x))
    plain, _ = make()
    plain.load_state_dict(model.state_dict())
    state = scale_state(model)
    state.pop(next(iter(state)))
    with pytest.raises(ValueError, match="missing"):
        load_scale_state(again, state)


def _broken(plan: Plan, **links) -> Plan:
    unit = plan.units[-1]
    return change(plan, units=[*plan.units[:-1], change(unit, links=[change(unit.links[0], **links), *unit.links[1:]])])


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (lambda m, p: _broken(p, linear="over.nope"), ["over.nope: the model has no such module"]),
        (lambda m, p: _broken(p, linear="over.1"), ["over.1: is a ReLU, expected an nn.Linear"]),
        (lambda m, p: _broken(p, k=7), ["over.0: the model has K 85, N 128, the plan K 7, N 128"]),
        (lambda m, p: _broken(p, activation="silu"), ["over.0: the model has activation relu after it, the plan silu"]),
        (lambda m, p: _broken(p, passed=[]), ["over.0: the model has activation none after it, the plan relu"]),
        (lambda m, p: _broken(p, passed=["over.9"]), ["over.9: the model has no such module"]),
        (lambda m, p: _broken(p, callers=["over.nope"]), ["over.nope: the model has no such module"]),
        (lambda m, p: _broken(p, norm="layer", norm_site="over.1"), ["the model has norm none after it, the plan layer"]),
        (lambda m, p: (setattr(m.over, "1", nn.SiLU()), p)[1], ["the model has activation silu after it, the plan relu"]),
        (lambda m, p: (setattr(m.over, "3", nn.LeakyReLU(0.3)), setattr(m.over, "1", nn.Softmax(-1)), p)[2],
         ["over.1: is a Softmax, which cannot run in a chain", "over.3: has slope 0.3, the plan 0.01"]),
        (lambda m, p: (m.over[2].register_forward_hook(lambda *_: None), p)[1], ["over.2: has hooks"]),
        (lambda m, p: (m.over[1].register_forward_hook(lambda *_: None), p)[1], ["over.1: has hooks"]),
        (lambda m, p: change(p, units=[*p.units, UnitPlan(name="x", links=[LinkPlan(linear="nope", k=1, n=1)], around="here")]),
         ["nope: the model has no such module", "here: the model has no such module"]),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit_are_refused_with_every_reason_and_nothing_is_changed(spoil, reasons: list[str]) -> None:
    model, x = make()
    plan = spoil(model, plan_everything(model, x))
    kinds, before = [type(m) for m in model.modules()], model(*x)
    with pytest.raises(ValueError, match="does not fit this model") as refused:
        loka.convert(model, plan)
    for reason in reasons:
        assert reason in str(refused.value)
    assert [type(m) for m in model.modules()] == kinds
    assert not any(chain_of(m) for m in model.modules())
    assert torch.equal(model(*x), before)


def test_float64_models_stay_in_float64() -> None:
    model, x = make("tower")
    plan = plan_everything(model, x)
    model.double()
    assert plan_everything(model, (x[0].double(),)).units == []
    with pytest.raises(ValueError, match="float64 weights"):
        loka.convert(model, plan)


@pytest.mark.parametrize("serving", [False, True])
def test_a_model_converted_in_inference_mode_trains_afterwards(serving: bool) -> None:
    model, x = make("tower")
    plan = plan_everything(model, x, serving=serving)
    with torch.inference_mode():
        loka.convert(model, plan, example=x, freeze=serving)
    model.train().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, x, optimizer)
    assert next(chains_of(model))[1].primed


def test_a_norm_with_another_eps_is_another_norm() -> None:
    model, x = make("tower")
    plan = plan_everything(model, x)
    model.net[1].eps = 1e-3
    with pytest.raises(ValueError, match=r"net.1: a layer norm with eps 0.001, the plan has net.1 with eps 1e-05"):
        loka.convert(model, plan)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, loka.nn.BlockNorm])
def test_a_plan_edited_to_another_eps_is_refused(norm: type[nn.Module]) -> None:
    """A block norm's kernel has a fixed eps: the plan would say what does not run."""
    model = nn.Sequential(nn.Linear(64, 256), norm(256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(8, 64)
    plan = plan_everything(model, x)
    (unit,) = plan.units
    first, *rest = unit.links
    edited = msgspec.structs.replace(unit, links=[msgspec.structs.replace(first, eps=0.5), *rest])
    with pytest.raises(ValueError, match=r"1: a \w+ norm with eps .*, the plan has 1 with eps 0.5"):
        loka.convert(model, msgspec.structs.replace(plan, units=[edited]))
    loka.convert(model, plan)


def test_twice_is_refused() -> None:
    model, x = converted()
    with pytest.raises(ValueError, match=r"already converted: dense.2, over.0; call loka.revert"):
        loka.convert(model, plan_everything(make()[0], x))


def test_mods_of_a_plan_are_applied_and_taken_back() -> None:
    model, x = make("tower")
    before, keys = model(*x), list(model.state_dict())
    plan = plan_everything(model, x, mods=["block_norm", "hard_swish"])
    assert torch.equal(model(*x), before), "planning changes nothing"
    done = loka.convert(model, plan, example=x)
    assert done.mods == ["block_norm", "hard_swish"]
    assert {link.norm for _, chain in chains_of(model) for link in chain.links[:-1]} == {"block"}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, x, optimizer)
    with pytest.raises(ValueError, match="call loka"):
        mods.revert(model)
    with pytest.raises(ValueError, match=r"changed the architecture by .*discard=") as refused:
        loka.revert(model)
    assert "block_norm" in str(refused.value)
    assert list(chains_of(model)), "nothing was changed"
    loka.revert(model, discard=["block_norm", "hard_swish"])
    assert list(model.state_dict()) == keys
    assert not list(chains_of(model))
    assert [type(m).__name__ for m in model.net] == ["Linear", "LayerNorm", "SiLU"] * 3
    model(*x)


def test_a_plan_that_fails_after_its_mods_takes_them_back() -> None:
    model, x = make("tower")
    plan = _broken(plan_everything(model, x, mods=["block_norm"]), k=3)
    before, kinds = model(*x), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="does not fit this model"):
        loka.convert(model, plan, example=x)
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model(*x), before)


def _families() -> list[str]:
    return [*ZOO, *models.names()]


@pytest.mark.parametrize("name", _families())
def test_fuse_and_a_plan_place_the_same(name: str) -> None:
    from mods.zoo import family_inputs

    torch.manual_seed(0)
    if name in ZOO:
        model, x = make(name)
    else:
        model = models.build(name, "tiny")
        x = tuple(t.float() if isinstance(t, Tensor) and t.dtype == torch.float64 else t for t in family_inputs(name, model.config))  # fmt: skip
    twin = copy.deepcopy(model)
    mods.apply(model, mods.Fuse(), example=x)
    loka.convert(twin, plan_everything(twin, x))
    assert placed(model) == placed(twin)


def test_serving_from_a_calibration() -> None:
    model, x = make()
    exact = model.eval()(*x)
    plan = plan_everything(model, x)
    with pytest.raises(ValueError, match=r"no scales are known for dense.2, over.0; hint: .*calibrating"):
        loka.convert(model.train(), plan, freeze=True)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not list(chains_of(model))
    loka.convert(model, plan)
    with calibrating(model), torch.no_grad():
        model.eval()(*x)
    assert freeze_model(model) == 5
    served = model(*x)
    assert not served.requires_grad
    assert (served - exact).norm() < 0.1 * exact.norm()
    model.train().requires_grad_(True)
    model(*x).sum().backward()
    loka.revert(model)
    known, _ = make()
    loka.convert(known, plan_everything(known, x, serving=True), freeze=True)
    assert (known(*x) - exact).norm() < 0.1 * exact.norm()
    copied = pickle.loads(pickle.dumps(known))
    assert torch.equal(copied(*x), known(*x))
    loka.revert(copied)
    assert torch.equal(copied.eval()(*x), exact)


def test_a_backend_beside_the_plan_runs() -> None:
    model, x = make()
    plan = plan_everything(model, x)
    loka.convert(model, plan, backend="reference")
    assert {(c.precision.fused_backend, c.precision.gemm_backend) for _, c in chains_of(model)} == {("reference", "reference")}  # fmt: skip
    loka.revert(model)
    with pytest.raises(ValueError, match="no backend 'nope'"):
        loka.convert(model, plan, backend="nope")


def test_gradient_accumulation_is_one_step_of_the_scales() -> None:
    model, x = converted("tower")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, x, optimizer)
    chain = next(chains_of(model))[1]
    scales = [state.scale.clone() for state in chain.remembered]
    optimizer.zero_grad()
    for factor in (1.0, 3.0):
        model(x[0] * factor).square().mean().backward()
        assert all(torch.equal(s.scale, was) for s, was in zip(chain.remembered, scales, strict=True)), "micro-batches share one scale"  # fmt: skip
    delayed = chain.remembered[:-1]  # the gradient that comes in from outside is scaled by its own magnitude
    filled = [int((s.history > 0).sum()) for s in delayed]
    optimizer.step()
    assert [int((s.history > 0).sum()) for s in delayed] == [n + 1 for n in filled]


def test_an_evaluation_between_two_steps_leaves_no_trace() -> None:
    model, x = converted("tower")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, x, optimizer)
    before = {name: tensor.clone() for name, tensor in scale_state(model).items()}
    with torch.no_grad():
        model.eval()(x[0] * 100)
    model.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in scale_state(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_runs_the_same_twice(reentrant: bool) -> None:
    results = []
    for checkpointed in (False, True):
        model, x = converted("tower")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        given = x[0].clone().requires_grad_()
        for _ in range(3):
            optimizer.zero_grad()
            out = checkpoint(model, given, use_reentrant=reentrant) if checkpointed else model(given)
            out.square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_scales_follow_another_loss_scale_one_linear_a_step() -> None:
    """docs/limits.md says how many steps that takes, and that `loka.refresh` can take them without an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
    plain, x = copy.deepcopy(model), torch.randn(32, 64)
    plan = plan_everything(model, x)
    loka.convert(model, plan)
    for factor, steps in ((1.0, 3), (2.0**16, 4)):  # the scales of a loss as it is, then of a scaled one
        found = []
        for _ in range(steps):
            for each in (model, plain):
                each.zero_grad()
                (factor * each(x).square().mean()).backward()
            found.append(float(model[0].weight.grad.norm() / plain[0].weight.grad.norm()))
            loka.refresh(model)
    assert max(found[:3]) < 0.1
    assert found[3] == pytest.approx(1.0, abs=0.1)


def test_a_grad_scaler_sees_an_overflow_and_recovers() -> None:
    model, x = converted("tower")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for at in range(6):
        optimizer.zero_grad()
        loss = model(*x).square().mean()
        if at == 3:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert moved == (at != 3), at
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(s.scale.isfinite() for _, chain in chains_of(model) for s in chain.remembered)


def test_gradient_clipping_and_an_average_of_the_weights() -> None:
    model, x = converted()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(*x).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite()
        optimizer.step()
        average.update_parameters(model)
    names = [[name for name, _ in chains_of(one)] for one in (model, average.module)]
    assert names[0] == names[1]
    with torch.no_grad():
        wanted, got = model.eval()(*x), average.eval()(*x)
    assert 0 < (got - wanted).norm() < wanted.norm()


def test_without_a_torch_optimizer_refresh_ends_a_step() -> None:
    model, x = converted()
    model(*x).sum().backward()
    assert not any(chain.primed for _, chain in chains_of(model))
    assert loka.refresh(model) == 5
    assert all(chain.primed and chain.gradients_primed for _, chain in chains_of(model))


@pytest.mark.parametrize("at", ["deep1", "deep2"])
def test_a_model_that_got_another_linear_is_reverted_completely(at: str) -> None:
    """Also if it replaces the first linear of a chain, which runs all of it."""
    model, x = converted("cross")
    linear = model.get_submodule(at)
    assert chain_of(linear) is not None
    setattr(model, at, nn.Linear(linear.in_features, linear.out_features))
    with pytest.raises(AnotherPathError):
        model(*x)
    loka.revert(model)
    assert not any("loka" in key for module in model.modules() for key in vars(module))
    assert torch.equal(model(*x), copy.deepcopy(model)(*x))
    loka.convert(model, plan_everything(model, x))
    model(*x).sum().backward()


def test_a_plan_may_call_a_linear_by_another_of_its_names() -> None:
    model, x = make("cross")
    model.alias = model.deep1
    plan = plan_everything(model, x)
    renamed = change(plan, units=[change(u, links=[change(k, linear="alias" if k.linear == "deep1" else k.linear) for k in u.links]) for u in plan.units])  # fmt: skip
    loka.convert(model, renamed)
    assert chain_of(model.deep1) is chain_of(model.deep2) is not None
    model(*x).sum().backward()


def test_weight_gradients_are_added_exactly_and_an_older_plan_that_does_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    seen: list[tuple[int, bool]] = []

    def spy(a, b, **options):
        seen.append((a.shape[1], options["fast_accum"]))
        return scaled_mm(a, b, **options)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(80, 64)
    plan = plan_everything(model, x)
    for file in ("chain_forward", "chain_backward"):
        monkeypatch.setattr(f"loka.lowp.{file}.scaled_mm", spy)
    loka.convert(model, plan)
    model(x).sum().backward()
    assert {fast for k, fast in seen if k == 80} == {False}  # sums over the batch
    assert any(fast for k, fast in seen if k != 80)

    alone = nn.Sequential(nn.Linear(64, 64))
    choices = [choice_of(gemm, recipe_named("rowwise").operands(gemm), "asked for") for gemm in GEMMS]
    older = [msgspec.structs.replace(choice, fast_accum=True) for choice in choices]
    for chosen, told in ((choices, False), (older, True)):
        site = SitePlan(site="0", m=80, k=64, n=64, flops_share=1.0, choices=chosen)
        done = loka.convert(alone, msgspec.structs.replace(plan, units=[], sites=[site]), backend="auto")
        assert any("accumulates the weight gradients of 0 in the tensor cores" in note for note in done.notes) is told
        loka.revert(alone)


class _Called(nn.Module):
    """Activations are called as functions: no module shows what stands between two linears."""

    def __init__(self, act: Any = F.relu, residual: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.act, self.residual = act, residual

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        return self.last(F.relu(self.b(h + x if self.residual else h)))


@pytest.mark.parametrize(("other", "said"), [({"act": F.silu}, "silu was called after a"), ({"residual": True}, "add reads a value inside the chain a"), ({"act": F.softplus}, "softplus reads a value inside the chain a")])  # fmt: skip
def test_an_example_shows_that_a_plan_is_for_another_forward(other: dict[str, Any], said: str) -> None:
    """Names and shapes fit; without the example the first step would end."""
    x = torch.randn(8, 64)
    plan, model = plan_everything(_Called(), x), _Called(**other)
    with pytest.raises(ValueError, match=f"units do not fit this model:\n.*{said}"):
        loka.convert(model, plan, example=x)
    assert type(model.a) is nn.Linear
    assert model.training
    model(x)
    assert loka.convert(_Called(), plan, example=x).units


def test_a_plan_of_another_model_names_the_linears_of_its_chains_too() -> None:
    plan = plan_everything(_Called(), x := torch.randn(8, 64))
    other = nn.ModuleDict({"a": nn.Linear(64, 64), "tail": nn.Linear(64, 1)})
    for example in (None, x):
        with pytest.raises(ValueError, match="does not fit this model") as caught:
            loka.convert(other, plan, example=example)
        assert "b: the model has no such module" in str(caught.value)
        assert "last: the model has no such module" in str(caught.value)


def test_a_model_that_became_float64_is_told_what_to_do() -> None:
    model, x = _Called(), torch.randn(8, 64)
    expected = copy.deepcopy(model).double()(x.double())
    loka.convert(model, plan_everything(model, x))
    with pytest.raises(
        ValueError, match=r"a is converted and its input is torch\.float64.*; hint: loka\.revert\(model\) first"
    ):
        model.double()(x.double())
    loka.revert(model)
    assert torch.equal(model(x.double()), expected)


def test_a_model_without_values_is_refused() -> None:
    plan, model = plan_everything(_Called(), torch.randn(8, 64)), _Called().to("meta")
    with pytest.raises(ValueError, match=r"a: on the meta device, without values; hint: model\.to_empty"):
        loka.convert(model, plan)
    assert type(model.a) is nn.Linear


def test_an_activation_that_no_kernel_knows_is_refused() -> None:
    plan = plan_everything(_Called(), torch.randn(8, 64))
    links = [change(link, activation="swish") for link in plan.units[0].links]
    edited = change(plan, units=[change(plan.units[0], links=links)], seal=None)
    with pytest.raises(ValueError, match="a: activation 'swish', expected one of none, relu"):
        loka.convert(_Called(), edited)


def test_a_plan_for_a_part_or_for_the_whole_is_told_apart() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Called()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    x = torch.randn(8, 64)
    with pytest.raises(ValueError, match=r"names a, which is net\.a here; hint: loka\.convert\(model\.get_submodule\('net'\), plan\)"):  # fmt: skip
        loka.convert(Holding(), plan_everything(_Called(), x))
    with pytest.raises(ValueError, match=r"holds this one as net: it names net\.a, which is a here"):
        loka.convert(_Called(), plan_everything(Holding(), x))


@pytest.mark.parametrize("rewrite", [lambda m: prune.random_unstructured(m, "weight", 0.5), nn.utils.weight_norm], ids=["prune", "weight_norm"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_a_weight_that_a_hook_makes_after_the_conversion_is_refused(rewrite: Any) -> None:
    """The hook runs when its linear is called, after the head has read the weight: it would be one step old."""
    model, x = converted("tower")
    last = next(chains_of(model))[1].linears[-1]
    rewrite(last)
    with pytest.raises(ValueError, match="is made by a hook"):
        model(*x)
    loka.revert(model)
    loka.convert(model, plan_everything(model, x), example=x)  # now without that linear
    assert not any(last in chain.linears for _, chain in chains_of(model))
    model(*x)
