"""The guard: what it sees, what it switches, and what it leaves alone."""

import json
import logging
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from loka.formats import Spec, dequantize, quantize
from loka.lowp.guard import Guard, GuardConfig
from loka.lowp.health import sampled_error
from loka.lowp.linear import Linear, LinearBinding
from loka.placing import LinearOptions, Scaling, convert, load_scale_state, refresh, revert, scale_state
from loka.records import DriftReport
from loka.records.probe import Move, VerdictChange


def make(recipe: str = "rowwise", **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 16))
    convert(model, recipe=recipe, backend="reference", options=LinearOptions(**options))  # type: ignore[arg-type]
    return model


def step(model: nn.Module, x: Tensor | None = None) -> None:
    model.zero_grad()
    model(torch.randn(64, 32) if x is None else x).square().sum().backward()


def look(model: nn.Module, guard: Guard, x: Tensor | None = None) -> list[str]:
    guard.begin_step()
    step(model, x)
    return [f"{event.site} {event.action}" for event in guard.check()]


def spoil(linear: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale gone wrong: finite operands, and an output that is not."""
    monkeypatch.setattr(sys.modules["loka.formats.quantize"], "_check_given_scale", lambda scale, x, spec: scale)
    linear.state.x.largest.fill_(math.inf)  # type: ignore[union-attr]


class TestLooking:
    def test_a_sound_model_is_left_alone(self) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=1))
        for _ in range(3):
            assert look(model, guard) == []
        assert all(m.binding.quantized for m in model if isinstance(m, Linear))
        assert guard.switches == 0

    def test_the_sampled_error_is_the_error(self) -> None:
        a, b = torch.randn(200, 64), torch.randn(64, 300)
        exact = a @ b
        assert sampled_error(a, b, exact, torch.zeros(())) < 1e-6
        noisy = exact * (1 + 0.05 * torch.randn_like(exact))
        assert 0.03 < float(sampled_error(a, b, noisy, torch.tensor(3.0))) < 0.07

    @pytest.mark.parametrize("across", ["rows", "columns"])
    def test_what_vanishes_beside_something_huge_is_seen(self, across: str) -> None:
        """Relative to the norm of everything the error is nothing."""
        a, b = torch.randn(64, 32), torch.randn(32, 128)
        exact = a @ b
        if across == "rows":
            a[0] *= 1e6
            out = exact * 0
            out[0] = a[0] @ b
        else:
            b[:, ::16] *= 1e6
            out = exact * 0
            out[:, ::16] = (a @ b)[:, ::16]
        assert sampled_error(a, b, a @ b, torch.zeros(())) < 1e-6
        assert sampled_error(a, b, out, torch.zeros(())) > 0.7

    def test_one_huge_row_that_is_wrong_is_seen(self) -> None:
        a, b = torch.randn(64, 32), torch.randn(32, 128)
        a[0] *= 1e6
        out = a @ b
        out[0] /= 2  # one row of sixteen: little in the mean of the rows
        assert 0.49 < float(sampled_error(a, b, out, torch.zeros(()))) < 0.51

    @pytest.mark.parametrize("shape", [(1, 64, 1), (512, 64, 1), (1, 64, 512), (512, 256, 256)])
    def test_outputs_that_cancel_are_no_error(self, shape: tuple[int, int, int]) -> None:
        """A sound E4M3 GEMM stays far below the default threshold, whatever its width: a single output near zero has a large relative error."""
        m, k, n = shape
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(size, generator=generator) for size in ((m, k), (k, n)))
        spec = Spec.parse("e4m3:tensor")
        out = dequantize(quantize(a, spec)) @ dequantize(quantize(b, spec))
        found = [float(sampled_error(a, b, out, torch.tensor(float(turn)))) for turn in range(20)]
        assert sum(found) / 20 < 0.06

    def test_the_sample_moves_on_from_check_to_check(self) -> None:
        """Every fourth channel is large, the others vanish under one scale per tensor: the first look sees only the large ones."""
        torch.manual_seed(0)
        weight, x = torch.randn(256, 64) * 1e-8, torch.randn(128, 64)
        weight[::4] = torch.randn(64, 64)
        model = nn.Sequential(nn.Linear(64, 256, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(weight)
        convert(model, recipe="tensorwise", backend="reference")
        guard = Guard(model, GuardConfig(every=1))
        assert look(model, guard, x) == []
        assert look(model, guard, x) == ["0 switched"]

    def test_looking_changes_nothing(self) -> None:
        model, x = make(), torch.randn(64, 32)
        step(model, x)
        before = [p.grad.clone() for p in model.parameters()]
        guard = Guard(model, GuardConfig(every=1))
        look(model, guard, x)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))

    def test_it_looks_as_often_as_told(self) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=3))
        seen = []
        for _ in range(7):
            guard.begin_step()
            step(model)
            seen.append(float(model[0].state.health[0]))
            guard.check()
        assert seen == [1, 0, 0, 1, 0, 0, 1]

    def test_the_host_reads_nothing_while_a_step_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every way a tensor's value reaches Python is closed during the step."""
        model = make(scales="delayed", recipe="tensorwise")
        guard = Guard(model, GuardConfig(every=1))
        step(model)
        guard.begin_step()

        def forbidden(self: Tensor, *args: object) -> None:
            raise AssertionError("the host waited for the device")

        x = torch.randn(64, 32)
        stamps = {id(m.state.weights.stamp) for m in model if isinstance(m, Linear)}  # these live on the host
        real = Tensor.__int__
        with monkeypatch.context() as closed:
            for name in ("item", "tolist", "__bool__", "__float__"):
                closed.setattr(Tensor, name, forbidden)
            closed.setattr(Tensor, "__int__", lambda t: real(t) if id(t) in stamps else forbidden(t))
            closed.setattr(
                sys.modules["loka.formats.quantize"], "_check_given_scale", lambda scale, x, spec: scale
            )  # looks on CPUs
            model(x).square().sum().backward()
        assert guard.check() == []


class TestSwitching:
    def test_a_static_scale_that_is_too_small_is_switched_by_name(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make("tensorwise", scales="delayed")
        guard = Guard(model, GuardConfig(every=1))
        step(model)
        refresh(model)
        x = torch.randn(64, 32)
        with caplog.at_level(logging.WARNING, "loka.lowp.guard"):
            found = look(model, guard, 40 * x)  # forty times what the history knows: saturates in the first linear only
        assert found == ["0 switched"]
        assert "fprop error" in caplog.text
        assert not model[0].binding.quantized
        assert model[2].binding.quantized
        assert "guard: fprop error" in repr(model[0])
        exact = nn.functional.linear(x, model[0].weight, model[0].bias)
        assert torch.allclose(model[0](x), exact, rtol=1e-5, atol=1e-5)
        assert look(model, guard, 40 * x) == []

    def test_gradients_that_saturate_are_seen_in_backward(self) -> None:
        model = make("tensorwise", scales="delayed")
        guard = Guard(model, GuardConfig(every=1))
        x = torch.randn(64, 32)
        (model(x).square().sum() * 1e-4).backward()
        refresh(model)
        found = look(model, guard, x)
        assert found[-1] == "4 switched"
        assert all("backward error" in event.reason for event in guard.events)

    def test_where_a_nan_begins_is_switched_and_where_it_arrives_is_reported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make("tensorwise", scales="delayed")
        guard = Guard(model, GuardConfig(every=1))
        spoil(model[2], monkeypatch)
        found = look(model, guard)
        assert "2 switched" in found
        assert "4 reported" in found
        assert model[4].binding.quantized

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_bad_weight_is_reported_and_costs_no_switch(self, value: float) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=1))
        with torch.no_grad():
            model[2].weight[3, 3] = value
        look(model, guard)
        assert {event.action for event in guard.events} == {"reported"}
        assert "the weight is not finite in 1 of 1 observed calls" in next(
            e.reason for e in guard.events if e.site == "2"
        )
        assert guard.switches == 0

    def test_bad_data_switches_nothing(self) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=1))
        x = torch.randn(64, 32)
        x[0, 0] = math.nan
        assert {line.split()[1] for line in look(model, guard, x)} == {"reported"}

    def test_switches_are_capped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make("tensorwise", scales="delayed")
        guard = Guard(model, GuardConfig(every=1, max_switches=1))
        step(model)
        refresh(model)
        assert look(model, guard, 40 * torch.randn(64, 32)) == ["0 switched"]
        spoil(model[2], monkeypatch)
        assert "2 capped" in look(model, guard)
        assert model[2].binding.quantized

    def test_settings_and_models_are_checked(self) -> None:
        with pytest.raises(ValueError, match="max_error"):
            GuardConfig(max_error=0)
        with pytest.raises(ValueError, match="every=0"):
            GuardConfig(every=0)
        with pytest.raises(ValueError, match="no converted linear"):
            Guard(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match="config is dict, expected a GuardConfig"):
            Guard(make(), {"every": 20})  # type: ignore[arg-type]

    def test_stopping_leaves_no_counters(self) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=1))
        look(model, guard)
        guard.stop()
        assert model[0].state.health is None
        step(model)
        guard.begin_step()
        step(model)
        assert float(model[0].state.health[0]) == 1  # whoever begins a step looks again

    def test_sites_that_were_reverted_are_named(self) -> None:
        model = make()
        guard = Guard(model, GuardConfig(every=1))
        revert(model)
        for call in (guard.begin_step, guard.check, guard.state_dict):
            with pytest.raises(ValueError, match="no longer converted: 0, 2, 4"):
                call()
        guard.stop()


class TestRestart:
    @pytest.mark.parametrize("scales", ["dynamic", "delayed"])
    def test_bindings_and_scales_survive(self, scales: str) -> None:
        """One site is switched, one rebound; a model that was converted as the first one was runs as it ran."""

        def rebind(site: str) -> LinearBinding:
            return replace(make("rowwise")[2].binding, save="high", scaling=Scaling(history=4, margin=1))

        model, x = make("tensorwise", scales=scales), torch.randn(64, 32)
        guard = Guard(model, GuardConfig(every=1), decide=rebind)
        guard.begin_step()
        step(model, x)
        guard.report_drift("2", "x moved")
        guard.check()
        guard._act("0", "an error", True)
        state = json.loads(json.dumps(guard.state_dict()))
        scale = scale_state(model)

        again = make("tensorwise", scales=scales)
        again.load_state_dict(model.state_dict())
        resumed = Guard(again, GuardConfig(every=1))
        resumed.load_state_dict(state)
        load_scale_state(again, scale)
        assert [m.binding for m in again[::2]] == [m.binding for m in model[::2]]
        assert [m.state.note for m in again[::2]] == ["guard: an error", "new decision: x moved", ""]
        assert (resumed.step, resumed.switches) == (guard.step, guard.switches) == (1, 1)
        assert torch.equal(again(x), model(x))
        assert resumed.state_dict() == state

    def test_another_conversion_is_respected(self) -> None:
        """Sites the guard never touched run what the model was converted to this time."""
        guard = Guard(make("rowwise"))
        guard._act("0", "an error", True)
        other = make("tensorwise")
        before = other[2].binding
        Guard(other).load_state_dict(guard.state_dict())
        assert not other[0].binding.quantized
        assert other[2].binding is before

    def test_states_that_do_not_fit(self) -> None:
        guard = Guard(make())
        state = guard.state_dict()
        with pytest.raises(ValueError, match="not the state of a Guard: sites missing"):
            guard.load_state_dict({"step": 1, "switches": 0})
        state["sites"]["7"] = {}
        with pytest.raises(ValueError, match="switched 7, which are not converted in this model"):
            guard.load_state_dict(state)


class TestDrift:
    def test_a_new_decision_is_taken_at_the_next_check(self) -> None:
        model, asked = make(), []

        def decide(site: str) -> LinearBinding | None:
            asked.append(site)
            return LinearBinding() if site == "2" else None

        guard = Guard(model, GuardConfig(every=100), decide=decide)
        guard.report_drift("2", "mean moved by 3 sigma")
        guard.report_drift("4", "mean moved by 2 sigma")
        assert asked == []
        assert [(e.site, e.action) for e in guard.check()] == [("2", "rebound"), ("4", "reported")]
        assert not model[2].binding.quantized
        assert guard.switches == 1
        assert guard.check() == []

    @pytest.mark.parametrize("judged", [False, True])
    def test_a_probes_report_is_taken(self, judged: bool) -> None:
        moves = [
            Move(site=site, role="x", feature="absmax", since=0, step=40, before=1.0, after=9.0, sigmas=5.0)
            for site in ("0", "elsewhere", "4")
        ]
        report = DriftReport(
            model="toy",
            steps=80,
            window_steps=20,
            sites=3,
            too_short=[],
            moves=moves,
            judged=judged,
            changes=[VerdictChange(site="2", before="safe", after="unsafe")] if judged else [],
        )
        guard = Guard(make(), decide=lambda site: LinearBinding())
        assert guard.take_drift(report) == (["2"] if judged else ["0", "4"])
        found = {event.site: event for event in guard.check()}
        assert all(event.action == "rebound" for event in found.values())
        assert ("safe -> unsafe" in found["2"].reason) if judged else ("absmax 1 -> 9" in found["0"].reason)

    def test_drift_that_nobody_can_answer(self) -> None:
        guard = Guard(make())
        with pytest.raises(ValueError, match="decide="):
            guard.report_drift("0", "shifted")
        with pytest.raises(ValueError, match="no guarded site 'head'"):
            guard.report_drift("head", "shifted")


@pytest.mark.slow
def test_looking_compiles_two_variants_and_a_switch_one_more() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales="delayed"))
    guard = Guard(model, GuardConfig(every=2))
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    for k in range(6):
        guard.begin_step()
        step(compiled)
        optimizer.step()
        assert guard.check() == [], k
    assert counter.frame_count == 2
    guard.begin_step()
    step(compiled, 100 * torch.randn(64, 32))
    assert [event.site for event in guard.check()] == ["0"]
    for _ in range(3):
        guard.begin_step()
        step(compiled)
        guard.check()
    assert counter.frame_count == 3  # the switched model; a site in high precision is not looked at any more
