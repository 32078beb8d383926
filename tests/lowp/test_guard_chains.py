"""Guard over chains: which linear went wrong, what is opened and what stays, how it survives a restart."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn

import loka
from foreign_zoo import ZOO
from loka import Guard
from loka.lowp import GuardConfig, chain_of, chains_of
from loka.placing import plan_everything

NAMES = ["0", "2", "4"]


def make(**plan) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    x = torch.randn(64, 64)
    loka.convert(model, plan_everything(model, x, **plan))
    return model, x


def train(model: nn.Module, x: Tensor, guard: Guard | None = None, steps: int = 1, lr: float = 0.0) -> list:
    optimizer, events = torch.optim.SGD(model.parameters(), lr=lr), []
    for _ in range(steps):
        if guard is not None:
            guard.begin_step()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if guard is not None:
            events += guard.check()
    return events


def test_sound_chains_are_left_alone() -> None:
    for name, (build, inputs) in ZOO.items():
        torch.manual_seed(0)
        model, x = build(), inputs(64)
        loka.convert(model, plan_everything(model, x))
        guard = Guard(model, GuardConfig(every=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            guard.begin_step()
            model(*x).square().mean().backward()
            optimizer.step()
            assert guard.check() == [], name


def test_rows_as_large_as_exp_8z_are_noticed_at_the_linear_that_reads_them() -> None:
    """One scale for the tensor: beside rows of exp(8 z) the others vanish."""
    model, x = make()
    guard = Guard(model, GuardConfig(every=1))
    assert train(model, x, guard, 2) == []
    heavy = x * torch.exp(8 * torch.randn(64, 1))
    events = train(model, heavy, guard, 1)
    assert (events[0].site, events[0].action) == ("0", "switched")
    assert "error" in events[0].reason
    assert chain_of(model[0]) is None
    assert chain_of(model[4]) is not None, "what reads sound values stays"
    assert guard.opened.keys() == {event.site for event in events}
    assert guard.switches == 1, "of one check"
    train(model, x, guard, 2)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_linear_with_the_bad_weight_is_opened_by_name_and_both_halves_stay(at: int) -> None:
    model, x = make()
    train(model, x)
    with torch.no_grad():
        model[2 * at].weight[:, 0] = 3e5  # one input channel drowns the others in the weight's scale
    if at == 0:
        x = x.clone()
        x[:, 0] = 0
    else:  # the channel itself is silent, so that the exact layer does not feel it
        with torch.no_grad():
            model[2 * at - 2].weight[0] = 0
            model[2 * at - 2].bias[0] = 0
    guard = Guard(model, GuardConfig(every=1))
    events = train(model, x, guard)
    assert [(event.site, event.action) for event in events] == [(NAMES[at], "switched")]
    assert [link.linear for _, chain in chains_of(model) for link in chain.links] == NAMES[:at] + NAMES[at + 1 :]
    assert len(list(chains_of(model))) == (2 if at == 1 else 1)
    assert type(model[2 * at]) is nn.Linear
    assert train(model, x, guard) == []


@pytest.mark.parametrize("what", ["weight", "input"])
def test_trouble_that_began_elsewhere_is_reported_and_switches_nothing(what: str) -> None:
    model, x = make()
    train(model, x)
    guard = Guard(model, GuardConfig(every=1))
    if what == "weight":
        with torch.no_grad():
            model[0].weight[3, 3] = torch.nan
    else:
        x = x.clone()
        x[0, 0] = torch.inf
    events = train(model, x, guard)
    assert events
    assert {event.action for event in events} == {"reported"}, [str(event) for event in events]
    assert len(next(chains_of(model))[1].links) == 3


@pytest.mark.parametrize("every", [1, 4, 24])
def test_values_beyond_the_delayed_scale_are_counted(every: int) -> None:
    """Magnitudes that triple from step to step outrun any history, however often Guard looks."""
    model, x = make()
    train(model, x, steps=2)
    guard = Guard(model, GuardConfig(every=every, max_error=10.0))
    events = train(model, x, guard, 5)
    events += train(model, x * 30.0, guard)
    events += train(model, x * 30.0, guard, 24 - 6)
    assert events == [], "one jump is no reason"
    for growth in range(1, 26):
        events += train(model, x * 3.0**growth, guard)
    assert {event.site for event in events} >= {"0", "2"}
    assert all("exceeded the delayed scale in" in event.reason for event in events)
    late, x = make()
    for growth in range(6):
        train(late, x * 3.0**growth)
    guard = Guard(late, GuardConfig(every=2, max_error=10.0))
    assert train(late, x, guard, 5) == [], "what happened before the guard came is not its finding"


def test_serving_values_beyond_the_calibrated_scale_are_reported() -> None:
    torch.manual_seed(0)
    model, x = make(serving=True)
    loka.placing.freeze_model(model)
    guard = Guard(model, GuardConfig(every=1, max_error=10.0))
    for factor, expected in ((1.0, set()), (50.0, {"reported"})):
        guard.begin_step()
        model(x * factor)
        assert {event.action for event in guard.check()} == expected


def test_the_state_of_a_guard_survives_a_restart() -> None:
    model, x = make()
    guard = Guard(model, GuardConfig(every=1))
    train(model, x, guard, 2)
    train(model, x * torch.exp(8 * torch.randn(64, 1)), guard)
    assert guard.opened
    state = json.loads(json.dumps(guard.state_dict()))
    again, _ = make()
    again.load_state_dict(model.state_dict())
    fresh = Guard(again, GuardConfig(every=1))
    fresh.load_state_dict(state)
    assert fresh.state_dict() == guard.state_dict()
    loka.load_scale_state(again, loka.scale_state(model))
    assert torch.equal(again(x), model(x))
    other = nn.Sequential(nn.Linear(64, 64))
    loka.convert(other, recipe="tensorwise")
    with pytest.raises(ValueError, match="opened chains at 0"):
        Guard(other).load_state_dict(state)


def test_the_cap_and_the_end() -> None:
    model, x = make()
    train(model, x)
    guard = Guard(model, GuardConfig(every=1, max_error=1e-6, max_switches=0))
    events = train(model, x, guard)
    assert {event.action for event in events} == {"capped"}
    assert len(list(chains_of(model))) == 1
    guard.stop()
    assert all(chain.health is None for _, chain in chains_of(model))
    loka.revert(model)
    with pytest.raises(ValueError, match=r"no longer converted: 0, 2, 4"):
        guard.begin_step()


def test_a_drift_is_decided_anew() -> None:
    model, x = make()
    with pytest.raises(ValueError, match="this Guard has no `decide`"):
        Guard(model).report_drift("2", "scale moved")
    answers = iter([None, loka.lowp.binding.LinearBinding()])
    guard = Guard(model, decide=lambda site: next(answers))
    for expected in ("reported", "rebound"):
        guard.report_drift("2", "scale moved")
        assert [event.action for event in guard.check()] == [expected]
    assert chain_of(model[2]) is None
    model(x).sum().backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_one_linear_or_a_whole_chain_is_put_back_by_name() -> None:
    model, x = make()
    guard = Guard(model, GuardConfig(every=1))
    train(model, x, guard)
    (event,) = guard.put_back("2")
    assert (event.site, event.action) == ("2", "switched")
    assert [[link.linear for link in chain.links] for _, chain in chains_of(model)] == [["0"], ["4"]]
    assert train(model, x, guard) == []
    with pytest.raises(ValueError, match=r"no guarded site '2'; there are 0, 4"):
        guard.put_back("2")
    whole, x = make()
    guard = Guard(whole, GuardConfig(every=1))
    assert [event.site for event in guard.put_back("2", chain=True)] == NAMES
    assert not list(chains_of(whole))
    assert train(whole, x, guard, 2) == [], "a guard that has nothing left to watch raises nothing"
    again, _ = make()
    Guard(again).load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert not list(chains_of(again))
    assert torch.equal(again(x), whole(x))


def test_a_compiled_model_runs_what_is_left_and_the_event_says_what_is_made_anew() -> None:
    torch._dynamo.reset()
    model, x = make()
    twin, _ = make()
    for m in (model, twin):
        train(m, x, steps=2)
    compiled = torch.compile(model, backend="aot_eager")
    guards = [Guard(m) for m in (compiled, twin)]
    for m in (compiled, twin):
        train(m, x, lr=1e-2)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    events = [guard.put_back("2")[0] for guard in guards]
    anew = "the model recompiles in the next step; a CUDA graph that captured it must be captured again"
    assert anew in events[0].reason
    assert "compiles" not in events[1].reason
    for m in (compiled, twin):
        train(m, x, lr=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    model.compile(backend="aot_eager")
    assert anew in Guard(model).put_back("0")[0].reason
