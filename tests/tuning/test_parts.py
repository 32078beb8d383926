"""The parts of tune by themselves: intervals, evidence on disk, what is offered and refused, chains that are split, fragments."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import loka
from loka.dispatch.choosing import (
    Chosen,
    Limits,
    Looked,
    Offer,
    SiteLook,
    add_in_squares,
    make_offers,
    split_unit,
    to_plan_parts,
)
from loka.formats import left_in_sum
from loka.probe.paired import Losses
from loka.records import Interval, LinkPlan, Magnitude, UnitPlan
from loka.tuning import choosing, looking, timing
from loka.tuning.call import Call, Selection
from loka.tuning.choosing import estimate as estimate_all
from loka.tuning.choosing import time_unit
from loka.tuning.estimating import Estimator
from loka.tuning.evidence import Evidence
from loka.tuning.fragment import make_fragment
from loka.tuning.looking import look
from loka.tuning.progress import Progress
from loka.tuning.task import Task
from loka.tuning.timing import COMPILERS, Captured, can_time, compare, say_host
from loka.tuning.whole_step import name_run, say_compiler
from loka.units import discover, place

from .small import Ranker, loss, make_batches, make_trained, same, state_of, tune

LIMITS = Limits.before_swapping(1e-3, training=True)


def losses(values: list[float]) -> Losses:
    return Losses(torch.tensor(values, dtype=torch.float64), per_example=True)


def exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


def test_a_paired_change_is_relative_with_its_interval() -> None:
    torch.manual_seed(0)
    base = 1 + torch.rand(400, dtype=torch.float64)
    noise = 0.01 * torch.randn(400, dtype=torch.float64)
    change = Losses(base * 1.02 + noise, True).change_from(Losses(base, True))
    assert change.low < 0.02 < change.high
    spread = float(noise.std()) / math.sqrt(400) / float(base.mean())
    assert change.high - change.value == pytest.approx(1.96 * spread, rel=0.05)


def test_few_pairs_give_wide_intervals() -> None:
    """Student's t: for two batches 12.7 standard errors, for one nothing below the change itself."""
    change = losses([1.01, 1.03]).change_from(losses([1.0, 1.0]))
    assert change.value == pytest.approx(0.02)
    assert change.high - change.value == pytest.approx(12.7 * 0.01, rel=0.01)
    alone = losses([0.9]).change_from(losses([1.0]))
    assert (alone.low, alone.high) == pytest.approx((-0.1, 0.1))


@pytest.mark.parametrize(("base", "other"), [([1.0, 1.0], [1.0, math.nan]), ([1.0], [math.inf]), ([math.nan, 1.0], [1.0, 1.0])])  # fmt: skip
def test_what_is_not_finite_is_never_within(base: list[float], other: list[float]) -> None:
    assert losses(other).change_from(losses(base)).low == 1e9


def test_a_digest_is_of_every_value() -> None:
    assert losses([1.0, 2.0]).digest == losses([1.0, 2.0]).digest
    assert losses([1.0, 2.0]).digest != losses([1.0, 2.0000001]).digest


def test_evidence_is_on_disk_at_once_and_belongs_to_one_model(tmp_path: Path) -> None:
    first = Evidence(tmp_path, Ranker(), {"training": True})
    first.put_interval("speed", Interval(value=1.5, low=1.4, high=1.6))
    assert json.loads((tmp_path / "evidence.json").read_text())["known"] == {"speed": [1.5, 1.4, 1.6]}
    again = Evidence(tmp_path, Ranker(), {"training": True})
    assert again.resumed
    assert again.get_interval("speed") == Interval(value=1.5, low=1.4, high=1.6)
    assert again.get_interval("other") is None
    other = Evidence(tmp_path, Ranker(), {"training": False})
    assert not other.resumed
    assert other.get("speed") is None
    assert [p.name for p in tmp_path.iterdir()] == [f"evidence-{first.fingerprint[:16]}.json"]
    other.put("speed", 1.0)
    assert Evidence(tmp_path, Ranker(), {"training": True}).known == first.known  # each call finds its own again
    assert Evidence(tmp_path, Ranker(), {"training": False}).known == other.known
    assert not Evidence(None, Ranker(), {}).resumed


def test_evidence_of_what_units_ran_before_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Evidence(tmp_path, nn.Linear(2, 2), {}).put("unit", 1.0)
    assert Evidence(tmp_path, nn.Linear(2, 2), {}).resumed
    monkeypatch.setattr("loka.tuning.evidence.REVISION", 99)
    assert not Evidence(tmp_path, nn.Linear(2, 2), {}).resumed
    assert [p.name for p in tmp_path.iterdir()] != ["evidence.json"]


def test_independent_errors_add_in_squares() -> None:
    assert add_in_squares([exactly(3.0), exactly(4.0)]).value == 5.0


def looked_at(**harms: dict[tuple[str, str], float]) -> Looked:
    """A chain of linears with these predictions, all 64 x 64."""
    sites = {n: SiteLook(n, 64, 64, 32, {key: exactly(v) for key, v in h.items()}) for n, h in harms.items()}  # type: ignore[misc]
    links = [LinkPlan(linear=name, k=64, n=64, activation="relu") for name in harms]
    unit = UnitPlan(name=links[0].linear, links=links, scales="delayed", gradient="tensor")
    return Looked(sites, [unit], {}, 0.5)


def predicted(forward: float, backward: float = 0.0, finer: float = 0.0) -> dict[tuple[str, str], float]:
    found = {("fprop", "delayed"): forward, ("dgrad", "delayed"): backward, ("wgrad", "delayed"): 0.0}
    found |= {("fprop", "tensorwise"): forward, ("fprop", "rowwise"): finer, ("fprop", "static"): forward}
    return found


def test_a_safe_chain_is_offered_whole() -> None:
    chosen = make_offers(looked_at(a=predicted(1e-4), b=predicted(1e-4)), limits=LIMITS, training=True)
    assert [(o.way, o.unit.linears) for o in chosen.offers] == [("chain", ["a", "b"])]
    assert chosen.offers[0].flops_share == pytest.approx(1.0)
    assert not chosen.kept


def test_a_hopeless_linear_is_cut_out_and_given_finer_scales() -> None:
    sites = looked_at(a=predicted(1e-4), b=predicted(0.5, finer=1e-5), c=predicted(1e-4))
    chosen = make_offers(sites, limits=LIMITS, training=True)
    assert [(o.way, o.unit.linears) for o in chosen.offers] == [("chain", ["a"]), ("chain", ["c"]), ("rowwise", ["b"])]
    assert "predicted change of the loss 50.000%" in chosen.offers[-1].reason
    worse = make_offers(looked_at(a=predicted(1e-4), b=predicted(0.5, finer=0.5)), limits=LIMITS, training=True)
    assert "more than 5 times the margin" in worse.kept["b"]


def test_gradients_count_in_training_alone() -> None:
    sites = looked_at(a=predicted(1e-5, backward=0.01, finer=1.0))
    assert "dgrad" in make_offers(sites, limits=LIMITS, training=True).kept["a"]
    assert make_offers(sites, limits=LIMITS, training=False).offers


def test_a_linear_whose_weight_gradient_alone_fails_keeps_that_in_16_bits() -> None:
    bad = predicted(1e-5) | {("wgrad", "delayed"): 0.5, ("wgrad", "rowwise"): 0.5}
    bad |= {("fprop", "rowwise_with_gw_hp"): 1e-5, ("dgrad", "rowwise_with_gw_hp"): 1e-5}
    sites = looked_at(a=bad)
    (offer,) = make_offers(sites, limits=LIMITS, training=True).offers
    assert offer.way == "rowwise_with_gw_hp"
    assert "wgrad" in offer.reason
    _, (site,) = to_plan_parts([offer], sites, {}, {}, training=True)
    assert [choice.backend == "high" for choice in site.choices] == [False, False, True]


def test_without_a_gradient_nothing_is_predicted_and_nothing_offered() -> None:
    chosen = make_offers(looked_at(a={}), limits=LIMITS, training=True)
    assert "no gradient reached it" in chosen.kept["a"]
    assert not chosen.offers


def test_chains_are_split_where_a_linear_leaves() -> None:
    links = [LinkPlan(linear=n, k=64, n=64, activation="relu", norm="layer" if n == "b" else "none", norm_site="norm" if n == "b" else None) for n in "abcd"]  # fmt: skip
    magnitudes = {n: Magnitude(output=1.0) for n in "abcd"}
    unit = UnitPlan(name="a", links=links, scales="delayed", gradient="tensor", magnitudes=magnitudes)
    assert list(split_unit(unit, set())) == [unit]
    parts = list(split_unit(unit, {"c"}))
    assert [part.linears for part in parts] == [["a", "b"], ["d"]]
    assert parts[0].links[-1].norm == "none", "the norm behind its last linear stays in the model"
    assert [set(part.magnitudes) for part in parts] == [{"a", "b"}, {"d"}]
    assert (parts[0].scales, parts[1].scales) == ("delayed", "dynamic")
    assert list(split_unit(unit, set("abcd"))) == []


def test_what_is_left_out_says_which_margin_would_try_it() -> None:
    def kept(forward: float, backward: float = 0.0) -> str:
        sites = looked_at(a=predicted(1e-4), b=predicted(forward, backward=backward, finer=forward))
        return make_offers(sites, limits=Limits.before_swapping(2e-4, training=True), training=True).kept["b"]

    assert kept(0.00237).endswith("more than 5 times the margin of 0.020%; hint: margin=0.00048 would try it")
    asked = make_offers(looked_at(a=predicted(1e-4), b=predicted(0.00237, finer=0.00237)), limits=Limits.before_swapping(0.00048, training=True), training=True)  # fmt: skip
    assert not asked.kept, "and it does"
    assert "hint" not in kept(0.5), "nobody would ask for that"


def test_a_plan_has_a_word_for_every_linear() -> None:
    sites = looked_at(a=predicted(1e-4), b=predicted(0.5, finer=1e-5), c=predicted(0.5, finer=0.5))
    chosen = make_offers(sites, limits=LIMITS, training=True)
    units, plans = to_plan_parts(chosen.offers, sites, {}, chosen.kept, training=True)
    assert [unit.linears for unit in units] == [["a"]]
    assert [plan.site for plan in plans] == ["a", "b", "c"]
    said = {plan.site: plan.choices[0] for plan in plans}
    assert said["a"].reason == "in a chain"
    assert (said["b"].backend, said["b"].a) == ("auto", "e4m3:row")
    assert said["c"].backend == "high"
    assert "5 times the margin" in said["c"].reason


def test_looking_leaves_no_trace_and_sees_every_linear() -> None:
    model, optimizer = make_trained(5)
    before = state_of(model, optimizer)
    told: list[tuple[str, int, int]] = []
    seen = look(Task(model, make_batches(6), loss), training=True, progress=lambda *step: told.append(step))
    assert same(state_of(model, optimizer), before)
    assert told == [("look", 1, 3), ("look", 2, 3), ("look", 3, 3)]
    assert set(seen.sites) == {"first", "second", "third", "last"}
    assert all(site.rows == 128 for site in seen.sites.values())
    assert all(("fprop", "tensorwise") in seen.sites[name].harm for name in ("first", "second", "third"))
    assert 0 < seen.loss < 2


def test_coarser_scales_are_predicted_to_cost_no_less() -> None:
    """Where one row has a value of 3e6, which its weight ignores, a scale per tensor is predicted to cost more than one per row."""
    model, _ = make_trained(20)
    batches = [(torch.cat([x[:, :63], torch.where(torch.arange(128) == 0, 3e6, 0.0)[:, None]], 1), y) for x, y in make_batches(4)]  # fmt: skip
    with torch.no_grad():
        model.first.weight[:, 63] = 0
    site = look(Task(model, batches, loss), training=False).sites["first"]
    assert site.harm["fprop", "tensorwise"].value > 2 * site.harm["fprop", "rowwise"].value


def test_a_fragment_is_the_unit_and_can_be_placed() -> None:
    model, _ = make_trained(2)
    model.eval()
    x = torch.randn(16, 64)
    for unit in discover(model, x, linears=1).units:
        fragment, own = make_fragment(model, unit)
        assert all("." not in name for name in own.linears)
        given = torch.randn(8, unit.links[0].k)
        assert fragment.eval()(given).shape[0] == 8
        assert [dict(fragment.named_modules())[n].weight.shape for n in own.linears] == [
            dict(model.named_modules())[n].weight.shape for n in unit.linears
        ]
        assert not {id(p) for p in fragment.parameters()} & {id(p) for p in model.parameters()}


class Dropping(nn.Module):
    """Dropout as a module, as one module in two places, and as a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d, self.last = *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 1)
        self.own, self.shared = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(torch.relu(self.a(x)))
        x = self.shared(torch.relu(self.b(x)))
        x = F.dropout(F.gelu(self.c(x)), 0.3, self.training)
        return self.last(self.shared(torch.relu(self.d(x)))).squeeze(-1)


def test_a_fragment_drops_as_the_unit_does() -> None:
    model, x = Dropping(), torch.randn(16, 64)
    (unit,) = discover(model, x).units
    fragment, own = make_fragment(model, unit)
    modules = dict(fragment.named_modules())
    assert [modules[link.dropout_site].p for link in own.links] == [0.1, 0.2, 0.3, 0.2]
    plain = fragment(x)
    chain = place(fragment, own)
    assert chain.layout(torch.float32).dropout == (0.1, 0.2, 0.3, 0.2)
    torch.manual_seed(1)
    assert not torch.equal(fragment(x), plain)
    fragment.eval()(x)


def test_a_unit_that_is_split_drops_what_its_parts_can() -> None:
    (unit,) = discover(Dropping(), torch.randn(16, 64)).units
    first, second = split_unit(unit, {"b"})
    assert [link.dropout for link in (*first.links, *second.links)] == [0.1, 0.3, 0.2]
    plain = msgspec.structs.replace(unit.links[0], activation="none")  # a library's GEMM draws nothing
    alone = next(split_unit(msgspec.structs.replace(unit, links=[plain, *unit.links[1:]]), {"b"}))
    assert (alone.links[0].dropout, alone.links[0].passed) == (None, [])


def test_a_tower_with_dropout_is_tuned_as_one_chain() -> None:
    model = Dropping()
    tuned = tune(model)
    assert [unit.linears for unit in tuned.plan.units] == [["a", "b", "c", "d"]]
    x, _ = make_batches(1)[0]
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_speeds_are_ratios_turn_by_turn() -> None:
    times = {"bf16": [10.0, 12.0, 11.0], "loka": [5.0, 6.0, 10.0]}
    assert compare(times, "loka", "bf16") == Interval(value=2.0, low=1.1, high=2.0)
    assert "emulated" in (can_time(torch.device("cpu")) or "")
    assert can_time(torch.device("cuda")) is None


def test_a_step_that_waits_for_the_host_is_told() -> None:
    step = {"loka": 900.0, "bf16": 1200.0}
    assert say_host(step, {"loka": 800.0, "bf16": 400.0}, "loka", "bf16") is None
    said = say_host(step, {"loka": 3000.0, "bf16": 1000.0}, "loka", "bf16")
    assert said is not None
    assert (
        "3.00 ms on the host alone (16-bit: 1.00 ms), about 0.40x" in said
    )  # bf16 is not launched faster than it runs


def test_calls_of_different_size_cost_what_two_linears_would() -> None:
    """A tower that reads a query, and the 64 items beside it, whose mean counts."""

    class Towers(nn.Module):
        def __init__(self, *, shared: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.out = nn.Linear(64, 64), nn.Linear(64, 1)
            self.items = self.query if shared else nn.Linear(64, 64)
            self.items.load_state_dict(self.query.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            items = torch.relu(self.items(x.repeat(64, 1))).view(64, *x.shape).mean(0)
            return self.out(torch.relu(self.query(x)) + items).squeeze(-1)

    def harms(*, shared: bool) -> dict[str, float]:
        sites = look(Task(Towers(shared=shared), make_batches(2), loss), training=False).sites
        return {name: site.harm["fprop", "rowwise"].value for name, site in sites.items()}

    apart, together = harms(shared=False), harms(shared=True)["query"]
    assert max(apart["query"], apart["items"]) < together < 1.1 * 2**0.5 * (apart["query"] + apart["items"])


def test_the_flops_of_a_linear_are_of_all_rows_of_a_step() -> None:
    """One row for the query and 63 for its items are 64; a checkpoint that runs it again in backward adds none, and a batch without items has none."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.out = nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = checkpoint(self.tower, x, use_reentrant=False)
            items = checkpoint(self.tower, x.repeat(63, 1), use_reentrant=False).view(63, *x.shape) if len(x) > 8 else query[None]  # fmt: skip
            return self.out(torch.relu(query + items.mean(0))).squeeze(-1)

    batches = [make_batches(1, rows=rows, seed=i)[0] for i, rows in enumerate((8, 16, 8, 16))]
    sites = look(Task(Tower(), batches, loss), training=True).sites
    assert sites["tower"].rows == 16 * 63
    assert sites["tower"].flops == 6 * 64 * 64 * (8 + 16 * 64) / 2
    assert sites["out"].flops == 6 * 64 * 1 * 12


@pytest.mark.parametrize(("alone", "chains"), [(80.0, 1), (70.0, 0)])
def test_a_chain_is_taken_apart_where_its_linears_alone_are_faster(alone: float, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Times are made up: on this machine none means anything."""
    taken = {"bf16": 100.0, "bf16 layout": 100.0, "chain": 81.0, "rowwise": alone, "loka": 60.0}
    monkeypatch.setattr(timing, "can_time", lambda device: None)
    monkeypatch.setattr(timing, "capture", lambda step, kept: Captured(step, 1.0, kept))
    monkeypatch.setattr(timing, "time_in_turns", lambda runs: {name: [taken[name]] * 3 for name in runs})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    model, _ = make_trained(5)
    done = loka.tune(model, make_batches(8), loss, target="serve", margin=0.5, seconds=600, progress=False)
    assert len(done.plan.units) == chains
    low = {site.site: site.choices[0] for site in done.plan.sites if site.choices[0].backend not in ("high",)}
    if not chains:
        assert {choice.a for choice in low.values()} == {"e4m3:row"}
        assert all("where the chain" in choice.reason for choice in low.values())
        assert {unit.way for unit in done.record.units if unit.way != "high"} == {"rowwise"}


def test_a_unit_that_fails_where_it_is_timed_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = looked_at(**{name: predicted(1e-5) for name in "ab"})
    chosen = make_offers(looked, limits=LIMITS, training=False)
    selection = Selection(looked, chosen, losses([1.0]), losses([1.0]), [], 0.0002)
    call = call_of(training=False, budget=600.0)
    monkeypatch.setattr(timing, "can_time", lambda device: None)

    def fail(error: Exception) -> None:
        def time_it(*_: Any) -> None:
            raise error

        monkeypatch.setattr(choosing, "time_unit", time_it)
        choosing.choose_faster(call, selection)

    with pytest.raises(torch.OutOfMemoryError):  # not the unit's fault
        fail(torch.OutOfMemoryError("no room"))
    assert selection.offers
    names = [name for offer in selection.offers for name in offer.unit.linears]
    fail(Exception("ptxas failed"))  # Triton's errors are no RuntimeErrors
    assert not selection.offers
    assert all("ptxas failed" in chosen.kept[name] for name in names)


def call_of(**options: Any) -> Call:
    """A call without time left."""
    task = Task(nn.Linear(1, 1), [(torch.ones(1, 1), torch.ones(1, 1))] * 2, F.mse_loss)
    given = {"training": True, "budget": 0.0, **options}
    return Call(task, None, 0.0002, thorough=False, evidence=Evidence(None, task.model, {}), progress=Progress(False), **given)  # fmt: skip


def test_a_chain_that_was_timed_before_is_not_forgotten_where_the_budget_is_over() -> None:
    """Evidence of an older version has the chain alone, without its linears each by itself."""
    looked = looked_at(**{name: predicted(1e-5) for name in "ab"})
    (offer,) = make_offers(looked, limits=LIMITS, training=False).offers
    call = call_of(training=False)
    key = choosing.spell_key(call.task.model, offer.unit, "chain", looked.sites[offer.name].rows)
    known = call.evidence.put_interval(key, Interval(value=1.2, low=1.1, high=1.3))
    assert time_unit(call, offer, looked) == {"chain": known}
    assert not call.notes


def test_every_call_of_a_linear_is_in_an_estimate_of_the_whole() -> None:
    def estimate(calls: int) -> float:
        sites = {name: SiteLook(name, 2048, 2048, 16384, calls=calls if name == "again" else 1) for name in ("a", "again")}  # fmt: skip
        unit = UnitPlan(name="a", links=[LinkPlan(linear="a", k=2048, n=2048, activation="relu")], scales="delayed", gradient="tensor")  # fmt: skip
        looked, offer = Looked(sites, [unit], {"again": "called"}, 0.5), Offer(unit, "chain", None, 0.5, "")
        selection = Selection(looked, Chosen([offer], {}), losses([1.0]), losses([1.0]), [], 0.0002)
        found = estimate_all(call_of(estimator=Estimator("NVIDIA H200")), selection)
        assert found is not None
        assert found.linears is not None
        return found.linears.value

    assert 1.0 < estimate(8) < 1.0 + (estimate(1) - 1.0) / 3


def test_progress_is_silent_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (False, True):
        progress, seconds = Progress(show), {}
        with progress.phase("look", seconds):
            progress("look", 1, 2)
        progress.finish("done")
        assert list(seconds) == ["look"]
        assert ("loka tune: done" in capsys.readouterr().err) is show


def test_a_task_divides_its_batches() -> None:
    task = Task(nn.Linear(64, 1), make_batches(5), loss)
    assert (len(task.looking), len(task.held_out)) == (2, 3)
    assert len(Task(nn.Linear(64, 1), make_batches(100, rows=2), loss).kept) == 64


class Twice(nn.Module):
    """A linear under two names that is called twice, and in training a third time for an auxiliary result."""

    def __init__(self, *, auxiliary: bool = False) -> None:
        super().__init__()
        self.mix, self.out, self.auxiliary = nn.Linear(64, 64), nn.Linear(64, 1), auxiliary
        self.again = self.mix

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = self.out(torch.relu(self.again(torch.relu(self.mix(x)))))
        return (y, self.mix(x)) if self.auxiliary and self.training else y


def test_a_linear_that_is_called_twice_runs_by_itself() -> None:
    found = discover(Twice(), torch.randn(8, 64), linears=1)
    assert (found.by_themselves, found.units, set(found.alone)) == (["mix"], [], {"mix", "out"})
    assert not discover(
        Twice(auxiliary=True), torch.randn(8, 64), linears=1
    ).by_themselves  # a prediction layer in training
    sites = looked_at(mix=predicted(0.5, finer=1e-5))
    sites = Looked(sites.sites, [], {"mix": "it is called 2 times"}, 0.5, ["mix"])
    chosen = make_offers(sites, limits=LIMITS, training=True)
    assert [(offer.way, offer.name) for offer in chosen.offers] == [("rowwise", "mix")]
    assert not chosen.kept


def test_what_is_called_twice_is_looked_at_once_and_counted_twice() -> None:
    model = Twice()
    seen = look(Task(model, make_batches(4), lambda y, target: loss(y.squeeze(-1), target)), training=True)
    assert {name: (site.rows, site.calls) for name, site in seen.sites.items()} == {"mix": (128, 2), "out": (128, 1)}


def test_a_plan_of_everything_names_linears_in_wrapped_blocks() -> None:
    """With the rows and shares they have: kernels are chosen by them."""
    x, model = torch.randn(8, 64), nn.Sequential(checkpoint_wrapper(Twice()))
    plan = loka.placing.plan_everything(model, x, linears=64)
    mix, out = plan.sites
    assert (mix.site, mix.m, mix.low_precision_share) == ("0.mix", 8, pytest.approx(128 / 129))
    assert out.choices[0].reason == "it is a prediction layer"
    done = loka.convert(model, plan)
    assert (list(done.converted), done.low_precision_share) == (["0.mix"], pytest.approx(128 / 129))
    assert "e4m3" in str(model[0].mix)
    model(x).sum().backward()
    assert model[0].mix.weight.grad is not None


def test_what_was_fastest_says_how_to_compile_it() -> None:
    assert say_compiler(name_run("loka", "")) is None
    assert 'mode="max-autotune-no-cudagraphs"' in str(say_compiler(name_run("loka", "max-autotune")))
    assert "options={'coordinate_descent_tuning': True}" in str(say_compiler(name_run("loka", "coordinate descent")))
    assert say_compiler("bf16 layout") is None
    for given in COMPILERS.values():
        torch.compile(
            nn.Linear(2, 2), backend="inductor", **given
        )  # raises on a mode or option that torch does not know


def test_rows_that_are_kept_keep_no_others_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of all rows is computed before they are let go."""
    monkeypatch.setattr(looking, "ROWS", 8)
    linear = nn.Linear(64, 64)
    observer = looking._Observer("linear", linear, 1)
    linear.register_forward_hook(observer.see, with_kwargs=True)
    y = linear(torch.randn(96, 64))
    observer.armed, weights = True, torch.randn(96, 64)
    (y * weights).sum().backward()
    (rows,) = observer._rows
    assert torch.equal(rows.dy, weights[::12])
    assert rows.total == 96
    assert {t.untyped_storage().nbytes() for t in (rows.x, rows.dy)} == {8 * 64 * 4}
    assert float(rows.largest) == float(weights.abs().amax())
    assert torch.equal(rows.left, left_in_sum(weights))


def test_frozen_weights_are_judged_by_their_swap() -> None:
    """What trains on is held to what is predicted: 10 times the margin is not tried there."""
    sites = looked_at(a=predicted(1e-4), b=predicted(2e-3, finer=2e-3))
    for training, tried in ((True, False), (False, True)):
        chosen = make_offers(sites, limits=Limits.before_swapping(2e-4, training=training), training=training)
        assert any("b" in offer.unit.linears for offer in chosen.offers) is tried
