"""Units alone and together, paired: the harmful one is vetoed, the model is left as it was, and what cannot be resolved says so."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.dispatch.margin import allow
from loka.probe import Probe, Switchable, add_sensitivity, measure_sensitivity, swap
from loka.probe.sensitivity import fake_quantized
from loka.records import Interval

from .small import Small, batches, train


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y, reduction="none")


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    model = Small()
    train(model, batches(20))
    return model


def around(value: float, width: float) -> Interval:
    return Interval(value=value, low=value - width, high=value + width)


def test_a_module_that_is_frozen_in_a_training_model_stays_in_eval_mode(small: Small) -> None:
    small.train()
    small.first.eval()
    swap(small, [Switchable("first", lambda: None, lambda: None)], batches(8), losses)
    measure_sensitivity(small, ["last"], lambda model: (torch.cat([losses(model, b) for b in batches(4)]), None))
    assert [small.training, small.first.training, small.last.training] == [True, False, True]


def test_the_unit_that_hurts_is_vetoed_and_the_model_left_alone(small: Small) -> None:
    before = {k: v.clone() for k, v in small.state_dict().items()}
    state = torch.random.get_rng_state()
    broken: list[torch.utils.hooks.RemovableHandle] = []
    harmful = Switchable(
        "last",
        lambda: broken.append(small.last.register_forward_hook(lambda m, a, out: out + 0.5)),
        lambda: broken.pop().remove(),
    )
    harmless = Switchable("first", lambda: None, lambda: None)
    found = swap(small, [harmful, harmless], batches(8), losses)
    assert list(found.vetoed) == ["last"]
    assert "alone it changes the metric by" in found.vetoed["last"]
    assert found.alone["first"] == Interval(value=0.0, low=0.0, high=0.0)
    assert found.together == found.alone["last"]
    assert not found.holds
    assert found.examples == 8 * 48
    assert small.training
    assert not small.last._forward_hooks
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in small.state_dict().items())


def test_a_unit_that_cannot_run_is_a_veto_and_is_switched_off(small: Small) -> None:
    state: list[str] = []

    def enable() -> None:
        state.append("on")
        raise RuntimeError("no kernel")

    found = swap(small, [Switchable("odd", enable, state.clear), Switchable("fine", int, int)], batches(2), losses)
    assert "no kernel" in found.vetoed["odd"]
    assert state == []
    assert "fine" in found.alone
    assert not found.holds


def rounded_unit(model: nn.Module, site: str, recipe: str) -> Switchable:
    """A linear whose product is that of rounded operands while it is switched on."""
    stack = ExitStack()
    return Switchable(site, lambda: stack.enter_context(fake_quantized(model, {site: recipe})), stack.close)


def test_a_swap_does_what_measure_sensitivity_does(small: Small) -> None:
    data = batches(4)
    units = [rounded_unit(small, "first", "rowwise"), rounded_unit(small, "twice", "tensorwise")]
    found = swap(small, units, data, losses)
    x, y = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    alone = measure_sensitivity(small, {"first": "rowwise"}, lambda m: (losses(m, (x, y)).reshape(-1), None))
    assert found.alone["first"].value == pytest.approx(alone["first"].value, rel=1e-4)
    assert found.together is not None


def test_users_are_the_unit_where_they_are_named(small: Small) -> None:
    units = [rounded_unit(small, "first", "tensorwise")]
    alone = swap(small, units, batches(8), losses).alone["first"]
    grouped = swap(small, units, batches(8), losses, groups=lambda b: torch.arange(48) // 12).alone["first"]
    assert grouped.value == pytest.approx(alone.value)
    assert (grouped.low, grouped.high) != (alone.low, alone.high)


def test_the_upper_end_decides_in_both_directions() -> None:
    assert allow(around(0.0001, 0.00005)).within
    assert not allow(around(0.0001, 0.00015)).within
    assert not allow(around(-0.0003, 0.00005)).within  # better on these examples, worse on others
    assert not allow(around(0.0001, 0.00005), units=4).within


def test_what_cannot_be_resolved_is_held_against_a_tenth_of_a_percent_and_says_so() -> None:
    wide = allow(around(0.0001, 0.0005))
    assert wide.within
    assert wide.allowed == 0.001
    assert "cannot resolve 0.0200%" in wide.text
    assert not allow(around(0.0008, 0.0005)).within
    assert "cannot resolve" not in allow(around(0.0001, 0.00005)).text


def test_requests_that_cannot_be_honoured(small: Small) -> None:
    unit = Switchable("a", int, int)
    with pytest.raises(ValueError, match="iterator empty"):
        swap(small, [unit], iter(()), losses)
    with pytest.raises(ValueError, match="named twice"):
        swap(small, [unit, unit], batches(1), losses)
    with pytest.raises(ValueError, match="one per example"):
        swap(small, [unit], batches(1), lambda m, b: losses(m, b).mean())


def test_a_measured_change_vetoes_a_safe_verdict(small: Small) -> None:
    """A score can be wrong; a measurement of the metric itself is not overruled by it."""
    probe = Probe(small, every=1)
    train(small, batches(3), probe)
    report = probe.evaluate(["rowwise"], samples=2, margin=1e6)  # so that the score lets everything through
    assert {v.safety for v in report.site("first").verdicts} == {"safe"}
    strict = add_sensitivity(report, {"first": around(2.0, 0.1)}, described="log loss")
    assert strict.site("first").verdicts[0].safety == "safe"
    from msgspec.structs import replace

    held = type(report)(replace(report.record, margin=0.0002))
    vetoed = add_sensitivity(held, {"first": around(2.0, 0.1)}, described="log loss").site("first").verdicts[0]
    assert vetoed.safety == "unsafe"
    assert "+200.0000%" in vetoed.reason
    assert "vetoed" in vetoed.reason
    sites = [
        replace(
            site,
            verdicts=[replace(v, safety="unsafe") for v in site.verdicts],
            candidates=[replace(c, harm=around(0.0005, 0.0001)) for c in site.candidates],
        )
        for site in report.record.sites
    ]
    unsafe = type(report)(replace(report.record, margin=0.0002, sites=sites))
    found = {"first": around(0.0, 0.00001)}
    for recipes, decides in (({"first": "rowwise"}, True), ({"first": "tensorwise"}, False), (None, False)):
        kept = add_sensitivity(unsafe, found, described="log loss", recipes=recipes).site("first").verdicts[0]
        assert kept.safety == "unsafe"
        assert kept.reason.endswith(", which decides in a plan") is decides


def test_a_metric_that_is_another_each_time_is_refused(small: Small) -> None:
    """Also where a unit does not switch off."""
    stays = Switchable("last", lambda: small.last.register_forward_hook(lambda m, a, out: out + 0.5), lambda: None)
    with pytest.raises(ValueError, match="with every unit switched off again the metric changes"):
        swap(small, [stays], batches(8), losses)

    def halves(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].mul_(0.1)
        return losses(model, batch)

    with pytest.raises(ValueError, match="write to its batch"):
        swap(small, [Switchable("first", lambda: None, lambda: None)], batches(8), halves)


def test_a_coarse_margin_is_for_what_is_not_resolved() -> None:
    assert allow(around(0.00018, 0.00025)).within, "it may be less than 0.02 %, and is as measured"
    noisy = allow(around(0.0003, 0.00025))
    assert not noisy.within, "noise is no excuse for a change that is more as measured"
    assert not allow(around(-0.0003, 0.00025)).within
    assert not allow(around(0.0003, 0.0001), units=4).within
    assert "0.1%" not in allow(around(0.001, 0.006), margin=0.005).text
    assert (
        "allowed 0.1000% at the ends of the interval (these examples cannot resolve 0.0200%) and 0.0200% for the change"
        in noisy.text
    )
    for sign in (1, -1):
        assert not allow(around(sign * 0.0005, 0.00025)).within, "it is more than 0.02 %"
