"""A plan is bound by module, not by name; what it names runs, or it is refused with every reason."""

import warnings

import msgspec
import pytest
import torch
from torch import Tensor, nn

import loka
from loka.lowp import chains_of
from loka.lowp.linear import Linear
from loka.probe import Probe
from loka.records import LinkPlan, Plan, SitePlan, UnitPlan

change = msgspec.structs.replace


class Tied(nn.Module):
    """One linear under two names, set in either order, and a small head."""

    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        shared = nn.Linear(32, 32)
        for name in order:
            setattr(self, name, shared)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x).relu()))
        return out


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = Tied()
    probe = Probe(model, every=1, rows=64)
    model(torch.randn(64, 32)).square().mean().backward()
    probe.step()
    probe.detach()
    made = probe.evaluate(["tensorwise", "rowwise"], samples=2)
    return made.plan(min_speedup=None, recipe="rowwise", max_error=1.0, max_gradient_error=1.0)


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    return change(plan, sites=[change(site, site=names.get(site.site, site.site)) for site in plan.sites])


def with_another(plan: Plan, site: SitePlan) -> Plan:
    return change(plan, sites=[*plan.sites, site])


def site_of(plan: Plan, name: str) -> SitePlan:
    return next(site for site in plan.sites if site.site == name)


@pytest.mark.parametrize(("order", "name"), [("ab", "a"), ("ab", "b"), ("ba", "a"), ("ba", "b")])
def test_a_module_is_found_by_either_of_its_names(plan: Plan, order: str, name: str) -> None:
    model = Tied(order)
    summary = loka.convert(model, renamed(plan, {"a": name}))
    assert set(summary.converted) == {order[0], "head"}
    assert summary.kept == {}
    assert isinstance(model.a, Linear)
    assert summary.low_precision_share == pytest.approx(plan.low_precision_share)


def test_two_names_that_agree_are_one_site_and_count_once(plan: Plan) -> None:
    summary = loka.convert(Tied(), with_another(plan, change(site_of(plan, "a"), site="b")))
    assert len(summary.converted) == 2
    assert summary.low_precision_share == pytest.approx(plan.low_precision_share)
    assert summary.low_precision_share <= 1


@pytest.mark.parametrize(("chained", "own"), [("a", "b"), ("b", "a")])
def test_a_module_in_a_chain_has_no_choice_under_its_other_name(plan: Plan, chained: str, own: str) -> None:
    unit = UnitPlan(name=chained, links=[LinkPlan(linear=chained, k=32, n=32)])
    twice = change(renamed(plan, {"a": own}), units=[unit])
    model = Tied()
    with pytest.raises(ValueError, match=f"{own}: is the same module as {chained}, which is in the chain {chained}"):
        loka.convert(model, twice)
    assert type(model.a) is nn.Linear
    assert not list(chains_of(model))


def test_two_names_that_disagree_are_refused(plan: Plan) -> None:
    shared = site_of(plan, "a")
    other = [change(c, a="e4m3:tensor", b="e4m3:tensor") if c.gemm == "dgrad" else c for c in shared.choices]
    model = Tied()
    with pytest.raises(
        ValueError, match="a and b: one module under two names, and the plan has different settings for them"
    ):
        loka.convert(model, with_another(plan, change(shared, site="b", choices=other)))
    high = [change(c, a=None, b=None, backend="high") for c in shared.choices]
    with pytest.raises(ValueError, match="a and b: one module under two names"):
        loka.convert(model, with_another(plan, change(shared, site="b", choices=high)))
    assert type(model.a) is nn.Linear


def test_the_share_is_that_of_what_is_bound(plan: Plan) -> None:
    only = change(plan, sites=[site_of(plan, "head")])
    summary = loka.convert(Tied(), only)
    assert summary.kept == {"a": "not in the plan"}
    assert summary.low_precision_share == pytest.approx(site_of(plan, "head").low_precision_share)
    assert summary.low_precision_share is not None
    assert summary.low_precision_share < 0.1


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything reference is emulation, as on a GPU."""
    for place in ("loka.placing.linears.is_emulation", "loka.placing.conversion.is_emulation"):
        monkeypatch.setattr(place, lambda backend, _: backend == "reference")


def test_a_plan_made_on_a_cpu_is_not_emulated_on_a_gpu(plan: Plan, on_a_gpu: None) -> None:
    model = Tied()
    with pytest.raises(ValueError, match="which is emulation") as caught:
        loka.convert(model, plan)
    text = str(caught.value)
    for site in ("a", "head"):
        assert f"  {site} fprop, dgrad, wgrad: the plan names reference, which is emulation on cpu" in text
    assert "hint: probe and plan on this machine" in text
    assert "backend='auto'" in text
    assert type(model.a) is nn.Linear


def test_emulation_on_purpose_runs_with_one_warning(plan: Plan, on_a_gpu: None) -> None:
    model = Tied()
    with pytest.warns(UserWarning, match="a, head: emulated on the GPU, as backend='reference' asks") as seen:
        summary = loka.convert(model, plan, backend="reference")
    assert len(seen) == 1
    assert "/reference" in summary.converted["a"]
    model(torch.randn(4, 32)).sum().backward()


def test_a_backend_beside_a_plan_replaces_the_plan_s_and_nothing_else(plan: Plan) -> None:
    model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = loka.convert(model, plan, backend="auto")
    assert "fprop=e4m3:row@e4m3:row/auto (reference on cpu)" in summary.converted["a"]
    assert "backend 'auto' replaces the plan's own backends (reference)" in " ".join(str(summary).split())
    loka.revert(model)
    with pytest.raises(ValueError, match=r"a fprop: torch cannot run .* needs a CUDA GPU, not cpu"):
        loka.convert(model, plan, backend="torch")
    with pytest.raises(ValueError, match="no backend 'cutlass'"):
        loka.convert(model, plan, backend="cutlass")
    with pytest.raises(ValueError, match="the plan is for NVIDIA H200"):
        loka.convert(model, change(plan, target="NVIDIA H200"), backend="auto")
    measured = loka.convert(model, change(plan, min_speedup=1.05), backend="reference")
    assert "the plan's speed-ups were not measured with these kernels" in " ".join(str(measured).split())


@pytest.mark.gpu
def test_a_plan_made_on_a_cpu_on_a_gpu(plan: Plan) -> None:
    model = Tied().cuda()
    with pytest.raises(ValueError, match="which is emulation on cuda:0"):
        loka.convert(model, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = loka.convert(model, plan, backend="auto")
    assert "reference" not in summary.converted["a"]
    model(torch.randn(64, 32, device="cuda")).sum().backward()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=str)
def test_a_conversion_that_is_cut_short_leaves_nothing_behind(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    allocate, calls = Linear._allocate, []

    def fail_second(self: Linear) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise error
        allocate(self)

    monkeypatch.setattr(Linear, "_allocate", fail_second)
    with pytest.raises(type(error)):
        loka.convert(model, recipe="rowwise")
    assert len(calls) == 2
    assert [type(module) for module in model] == [nn.Linear] * 3
