"""One call of tune, phase by phase: compile the original, look, time units, swap them in, time the whole step, write the plan.

Every phase takes what the phase before it left and asks the evidence on disk first. Units are dropped until the metric and the step both hold.
"""

import gc
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from loka import mods as mods_room
from loka.dispatch.choosing import (
    Chosen,
    Limits,
    Offer,
    make_offers,
    part_of,
    predicted_harm,
    split_unit,
    take_apart,
    to_plan_parts,
)
from loka.placing import convert
from loka.probe.paired import Losses, has_drifted, spell_change
from loka.records import CollectivePlan, Interval, Plan, TablePlan, UnitEvidence, capture_environment
from loka.records.tuning import Estimate, TunedUnit, Tuning
from loka.tuning import timing
from loka.tuning.estimating import Estimator, Unit
from loka.tuning.evidence import Evidence
from loka.tuning.looking import Looked, look, name_unseen
from loka.tuning.progress import Progress
from loka.tuning.tables import choose_collectives, choose_tables, describe_part, rounded_weights, unrounded
from loka.tuning.task import MakeOptimizer, Task
from loka.tuning.verifying import converted, evaluate, evaluate_averaged, train_paired

EARLY = 0.995  # of the loss of a constant prediction: a model that is above it has learned nothing yet
ALONE = "rowwise"  # what a library would do with the linears of a chain
CLEARLY = 1.03  # times as fast: differences under 3 % are noise
COARSE = 0.001  # the margin where the data cannot resolve a finer one


def _spell_mode(mode: str | None) -> str:
    return "" if mode is None else " max-autotune"


class Session:
    """One call, phase by phase."""

    estimator: Estimator | None = None
    row_factor: float = 1.0
    train: int = 0
    optimizer: MakeOptimizer | None = None
    choose_tables: bool = False
    choose_collectives: bool = False
    swapped: Losses | None = None  # of the units that were swapped in last

    def __init__(self, task: Task, metric: Any, margin: float, training: bool, seconds: float, thorough: bool, out: Any, progress: Progress) -> None:  # fmt: skip
        self.task, self.metric, self.margin, self.training = task, metric, margin, training
        self.budget, self.thorough, self.progress = seconds, thorough, progress
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.estimates: dict[str, Interval] = {}
        self.tables: list[TablePlan] = []
        self.collectives: list[CollectivePlan] = []
        self.evidence = Evidence(out, task.model, {"training": training, "margin": margin, "thorough": thorough})
        if self.evidence.resumed:
            self.notes.append("went on from evidence of an earlier call")

    def time_original(self) -> None:
        """Compile and capture the model as it is, before anything changes it."""
        self.base: dict[str, timing.Captured] = {}
        self.host: dict[str, float] = {}
        self.untimed = timing.can_time(self.task.device)
        if self.untimed is not None:
            return
        with self.phase("compile 16 bits"):
            for mode in self.modes:
                try:
                    run = timing.whole_step(self.task, training=self.training, mode=mode)
                except timing.NotCapturedError as error:
                    self.untimed = str(error)
                    return
                self.base[f"bf16{_spell_mode(mode)}"] = run

    @property
    def modes(self) -> list[str | None]:
        """Of the compiler, each of which is tried."""
        return [None, "max-autotune-no-cudagraphs"] if self.thorough else [None]

    def apply_mods(self, asked: list[str]) -> list[str]:
        """Rewrites of the layout that keep the function, and what was asked for; the names of those that changed something."""
        names = [*asked, *mods_room.FREE]
        done = mods_room.apply(self.task.model, [mods_room.parse(name) for name in names], example=self.task.example())
        changed = {change.mod for change in done.summary.changed}
        taken = [name for name in names if name in changed]
        if taken != names:
            mods_room.revert(self.task.model)
            if taken:
                mods_room.apply(self.task.model, [mods_room.parse(name) for name in taken], example=self.task.example())
        return taken

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self.began)

    def run(self, mods: list[str]) -> Tuning:
        """Look, choose, verify."""
        self.notes += name_unseen(self.task.model)
        with self.phase("look"):
            looked = look(self.task, training=self.training, progress=self.progress)
            base = evaluate(self.task, self.task.held_out, self.metric, as_trained=self.training)
            self.check_repeatable(base)
            self.warn_if_early(base)
        chosen = make_offers(looked, limits=Limits.before_swapping(self.margin), training=self.training)
        with self.phase("time units"):
            offers, speeds = self.time_units(chosen, looked)
        with self.phase("verify the metric"):
            offers, alone, change, used = self.verify_metric(offers, chosen, looked, base, mods, speeds)
        measured, trained = list(offers), None
        if self.train:
            with self.phase("train a little"):
                offers, trained = self.verify_training(offers, chosen, looked, used)
        with self.phase("verify the step"):
            offers, change, _ = self.remeasure(offers, measured, chosen, looked, base, used, change)
            measured = list(offers)
            offers, step_times, speedup, note = self.verify_speed(offers, chosen, looked, mods, speeds)
            offers, change, why = self.remeasure(offers, measured, chosen, looked, base, used, change)
            if why is not None:
                step_times, speedup, note = {}, None, why
            if trained is not None and offers != measured:
                self.notes.append(f"the paired run of training had {', '.join(o.name for o in measured if o not in offers)} too, which left since")  # fmt: skip
        looked_at: list[TablePlan | CollectivePlan] = []
        if self.choose_tables or self.choose_collectives:
            with self.phase("choose tables and collectives"):
                looked_at, change = self.choose_parts(offers, chosen, looked, base, used, change)
        if change is not None:
            self.note_columns(base, used)
        plan = self.make_plan(offers, chosen, looked, mods, speeds, alone)
        return Tuning(
            model=type(self.task.model).__name__,
            target="train" if self.training else "serve",
            margin=self.margin,
            used_margin=used,
            units=[*self.describe(offers, chosen, looked, speeds, alone), *(describe_part(part) for part in looked_at)],
            plan=plan,
            step_microseconds=step_times,
            host_microseconds=self.host,
            speedup=speedup,
            speed_note=note,
            estimate=self.estimate(offers, looked),
            metric=base.mean if math.isfinite(base.mean) else None,
            metric_change=change,
            metric_unit="examples" if base.per_example else "batches",
            gradients=self.say_gradients(trained),
            training_change=trained,
            seconds=self.seconds,
            notes=self.notes,
            environment=capture_environment(device=self.device_name, threads=torch.get_num_threads()),
        )

    @property
    def device_name(self) -> str:
        """As records name it."""
        device = self.task.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def phase(self, name: str) -> Any:
        """Shown and timed."""
        return self.progress.phase(name, self.seconds)

    def check_repeatable(self, base: Losses) -> None:
        """Run the held-out batches once more: what is compared later differs by the arithmetic alone only where this changes nothing."""
        if not math.isfinite(base.mean):
            self.notes.append("the metric of the held-out batches is not finite in high precision, so nothing can be compared with it; hint: leave out the batches where it is not")  # fmt: skip
            return
        again = evaluate(self.task, self.task.held_out, self.metric, as_trained=self.training)
        if (change := has_drifted(again, base, self.margin)) is not None:
            raise ValueError(f"run twice in high precision, the same batches change the metric {spell_change(change)}: expected the same; do the step, the metric or the model keep a state of their own, or draw random numbers from a generator of their own?")  # fmt: skip

    def warn_if_early(self, base: Losses) -> None:
        """A model that is no better than its own mean prediction for everybody has learned nothing, and has no sites worth judging."""
        constant = evaluate_averaged(self.task, self.metric, as_trained=self.training)
        if constant is not None and torch.equal(constant.values, base.values):
            return  # the loss is computed inside the model, so that nothing can be said
        if constant is None or not (math.isfinite(base.mean) and constant.mean > 0) or base.mean < EARLY * constant.mean:  # fmt: skip
            return
        self.notes.append(f"too early: the loss {base.mean:.4f} is no better than {constant.mean:.4f}, which the model's mean prediction has when every example gets it; train until it is below {EARLY * constant.mean:.4f}, then tune again")  # fmt: skip

    def time_units(self, chosen: Chosen, looked: Looked) -> tuple[list[Offer], dict[str, Interval]]:
        """Drop what is not faster; units of one shape are timed once."""
        speeds: dict[str, Interval] = {}
        if timing.can_time(self.task.device) is not None:
            return (
                chosen.offers if self.estimator is None else self.estimate_units(self.estimator, chosen, looked)
            ), speeds
        kept = []
        for index, offer in enumerate(sorted(chosen.offers, key=lambda o: -o.flops_share)):
            self.progress("time units", index + 1, len(chosen.offers))
            timed = self.time_unit(offer, looked)
            if timed is None:
                kept.append(offer)
                continue
            way = max(timed, key=lambda name, timed=timed: timed[name].value)  # type: ignore[misc]
            way = way if timed[way].value > CLEARLY * timed[offer.way].value else offer.way
            found, taken = timed[way], [offer]
            if way != offer.way:
                why = f"{found.value:.2f}x, where the chain {offer.name} is {timed[offer.way].value:.2f}x"
                taken = take_apart(offer, way, looked, why=why, training=self.training)
                chosen.offers[:] = [*(o for o in chosen.offers if o is not offer), *taken]
            speeds.update(dict.fromkeys((o.name for o in taken), found))
            if found.low > 1.0:
                kept += taken
            else:
                chosen.kept.update(dict.fromkeys(offer.unit.linears, f"{way}: {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}], not faster than compiled 16 bits"))  # fmt: skip
        return kept, speeds

    def estimate_units(self, estimator: Estimator, chosen: Chosen, looked: Looked) -> list[Offer]:
        """Drop what is estimated not to be faster there."""
        kept = []
        for offer in chosen.offers:
            site = looked.sites[offer.name]
            if offer.way == "chain":
                found: Interval | None = estimator.speedup(self.unit_of(offer, looked))
            else:
                found = estimator.linear_speedup(round(site.rows * self.row_factor), site.k, site.n, offer.way, training=self.training)  # fmt: skip
            if found is not None:
                self.estimates[offer.name] = found
            if found is None or found.value > 1.0:
                kept.append(offer)
            else:
                chosen.kept.update(dict.fromkeys(offer.unit.linears, f"{offer.way}: estimated {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}] on {estimator.target}"))  # fmt: skip
        return kept

    def unit_of(self, offer: Offer, looked: Looked) -> Unit:
        """An offer by its sizes, with the rows it would have on the device that is estimated for."""
        rows = max(1, round(looked.sites[offer.name].rows * self.row_factor))
        return Unit(rows, tuple((link.k, link.n) for link in offer.unit.links), self.training)

    def estimate(self, offers: list[Offer], looked: Looked) -> Estimate | None:
        """All linears together, as they would run there: those that are not taken are in 16 bits on both sides."""
        found = self.estimator
        if found is None:
            return None
        total = None
        if offers:
            high = low = best = worst = 0.0
            taken = {name: o for o in offers for name in o.unit.linears}
            for name, site in looked.sites.items():
                rows = max(1, round(site.rows * self.row_factor))
                if name not in taken:
                    t16 = site.calls * found.microseconds(Unit(rows, ((site.k, site.n),), self.training))[0]
                    high, low, best, worst = high + t16, low + t16, best + t16, worst + t16
            for offer in offers:
                t16 = looked.sites[offer.name].calls * found.microseconds(self.unit_of(offer, looked))[0]
                speed = self.estimates.get(offer.name) or found.speedup(self.unit_of(offer, looked))
                high, low = high + t16, low + t16 / speed.value
                best, worst = best + t16 / speed.high, worst + t16 / speed.low
            total = Interval(value=high / low, low=high / worst, high=high / best)
        return Estimate(target=found.target, method=str(found), rows=self.row_factor, linears=total)

    def time_unit(self, offer: Offer, looked: Looked) -> dict[str, Interval] | None:
        """Speed-ups of a unit cut out of the model, by way: as it is offered and, of a chain that is served, its linears each by itself as a library would run them. None where the budget does not reach."""
        rows = looked.sites[offer.unit.linears[0]].rows
        ways = [offer.way, *([ALONE] if offer.way == "chain" and not self.training else [])]
        shape = " ".join(
            f"{link.k}x{link.n} {link.norm} {link.activation}{f' dropout {link.dropout:g}' if link.dropout else ''}"
            for link in offer.unit.links
        )
        keys = {way: f"unit {way} {rows} {shape}" for way in ways}
        known = {way: found for way, key in keys.items() if (found := self.evidence.get_interval(key)) is not None}
        late = self.left < self.budget * 0.4
        if len(known) == len(ways) or (late and offer.way in known):
            return known
        if late:
            self.notes.append(
                f"{offer.name} was not timed alone: the budget of {self.budget:g} s is kept for the whole step"
            )
            return None
        plain, _ = timing.make_fragment(self.task.model, offer.unit)
        dtype = self.task.autocast or next(self.task.model.parameters()).dtype
        x = torch.randn(rows, offer.unit.links[0].k, device=self.task.device, dtype=dtype)
        options: dict[str, Any] = {"training": self.training, "autocast": self.task.autocast, "mode": None}
        runs = {"bf16": timing.fragment_step(plain.train(self.training), x, **options)}
        runs |= {way: timing.fragment_step(self.lower_fragment(offer, way, x), x, **options) for way in ways}
        times = timing.time_in_turns(runs)
        return {way: self.evidence.put_interval(key, timing.compare(times, way, "bf16")) for way, key in keys.items()}

    def lower_fragment(self, offer: Offer, way: str, x: Tensor) -> nn.Module:
        """A unit cut out of the model and converted."""
        from loka.units import place

        low, unit = timing.make_fragment(self.task.model, offer.unit)
        if way != "chain":
            low.train(self.training)
            convert(low, recipe=way)
            return low
        chain = place(low, unit)
        if self.training:
            self.prime(low, x)
        else:
            low.eval().requires_grad_(False)
            chain.freeze()
        return low

    def prime(self, model: nn.Module, x: Tensor) -> None:
        """Steps without a change, so that delayed scales are known before anything is compiled."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            with self.task.context():
                model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def verify_metric(self, offers: list[Offer], chosen: Chosen, looked: Looked, base: Losses, mods: list[str], speeds: dict[str, Interval]) -> tuple[list[Offer], dict[str, Interval], Interval | None, float]:  # fmt: skip
        """Swap units in, alone and together; drop what costs most until the whole is within the margin."""
        alone: dict[str, Interval] = {}
        used, taken = self.margin, list(offers)
        for index, offer in enumerate(offers):
            self.progress("verify the metric", index + 1, len(offers) + 1)
            key = f"alone {offer.way} {offer.name} {len(offer.unit.links)} of {base.digest}"
            alone[offer.name] = self.evidence.get_interval(key) or self.evidence.put_interval(key, self.swap([offer], chosen, looked, base))  # fmt: skip
        for offer in [o for o in taken if alone[o.name].low == alone[o.name].high == 0.0]:
            taken.remove(offer)
            why = "swapped in, it changes no loss at all: its output does not reach what is measured, so nothing shows what FP8 would do there"
            chosen.kept.update(dict.fromkeys(offer.unit.linears, why))
        together = self.swap(taken, chosen, looked, base) if taken else None
        unresolved = None
        while together is not None:
            used, unresolved = self.margin_for(together), together if self.margin_for(together) > self.margin else None
            if self.is_within(together, used):
                break
            worst = max(taken, key=lambda o: alone[o.name].high)
            taken.remove(worst)
            exceeded = self.margin if together.low > self.margin else used
            for part in self.without_worst(worst, chosen, looked, alone, exceeded):
                alone[part.name] = self.swap([part], chosen, looked, base)
                taken.append(part)
            together = self.swap(taken, chosen, looked, base) if taken else None
        if unresolved is not None:
            self.notes.append(f"the held-out data resolve {unresolved.high - unresolved.value:.3%}, not the margin of {self.margin:.3%}: judged at {used:.1%}; {self.say_finer(base)}")  # fmt: skip
        return taken, alone, together, used

    def say_finer(self, base: Losses) -> str:
        """What would resolve more."""
        if base.step <= self.margin or base.per_example:
            return "more batches resolve more"
        return f"the loss comes in a type whose steps are {base.step:.2%}: compute its mean in float32, or return one number per example"

    def margin_for(self, change: Interval) -> float:
        """What a change is held against: the margin, or a coarser one where its interval does not resolve that."""
        return self.margin if change.high - change.value <= self.margin else max(COARSE, self.margin)

    def is_within(self, change: Interval, used: float) -> bool:
        """By its upper end; and where a coarser margin is used because the data do not resolve the one that was asked for, they must not show that it is exceeded."""
        return change.high <= used and change.low <= self.margin

    def choose_parts(self, offers: list[Offer], chosen: Chosen, looked: Looked, base: Losses, used: float, change: Interval | None) -> tuple[list[TablePlan | CollectivePlan], Interval | None]:  # fmt: skip
        """Tables and collectives that are within the margin alone, and with everything else; what costs most leaves until they are."""
        model = self.task.model

        def measure() -> Interval:
            found = evaluate(self.task, self.task.held_out, self.metric, as_trained=self.training)
            return found.change_from(base)

        tables = choose_tables(self.task, measure, used, training=self.training) if self.choose_tables else []
        sent = choose_collectives(self.task, measure, used) if self.choose_collectives else []
        found: list[TablePlan | CollectivePlan] = [*tables, *sent]
        taken = [part for part in found if part.evidence is not None]
        without = change
        while taken:
            self.tables = [part for part in taken if isinstance(part, TablePlan)]
            self.collectives = [part for part in taken if isinstance(part, CollectivePlan)]
            weights = next((part.codec for part in self.collectives if part.name == "weights"), "fp32")
            with unrounded(model, self.tables), rounded_weights(model, weights):
                change = self.swap(offers, chosen, looked, base)
            judged = [p for p in taken if p.evidence is not None and p.evidence.metric_change is not None]
            if self.is_within(change, used) or not judged:
                break
            worst = max(judged, key=lambda p: p.evidence.metric_change.high)  # type: ignore[union-attr]
            taken.remove(worst)
            self.notes.append(f"{worst.name} stays as it is: with everything together the metric moved {spell_change(change)}")  # fmt: skip
            self.tables, self.collectives, change, self.swapped = [], [], without, None
        return found, change

    def verify_training(self, offers: list[Offer], chosen: Chosen, looked: Looked, used: float) -> tuple[list[Offer], Interval | None]:  # fmt: skip
        """Train two copies a little, one by the plan; the unit whose gradients are predicted to cost most leaves until they end alike."""
        taken, change = list(offers), None
        while taken:
            plan = self.make_plan(taken, chosen, looked, [], {}, {})
            change = train_paired(self.task, plan, self.train, self.optimizer, self.metric, lambda done: self.progress("train a little", done, 2 * self.train))  # fmt: skip
            if self.is_within(change, used):
                return taken, change
            worst = max(taken, key=lambda o: 0.0 if o.harm is None else o.harm.value)
            taken.remove(worst)
            why = f"trained {self.train} steps with it, the metric moved {spell_change(change)}, more than {used:.3%}"
            chosen.kept.update(dict.fromkeys(worst.unit.linears, why))
        return taken, None

    def remeasure(self, offers: list[Offer], measured: list[Offer], chosen: Chosen, looked: Looked, base: Losses, used: float, change: Interval | None) -> tuple[list[Offer], Interval | None, str | None]:  # fmt: skip
        """A change belongs to the units it was measured with: where some left since, what is left is measured by itself, and left out too where it is not within the margin; then also why."""
        if offers == measured or not offers:
            return offers, change if offers else None, None
        change = self.swap(offers, chosen, looked, base)
        used = min(used, self.margin_for(change))
        if self.is_within(change, used):
            return offers, change, None
        gone = ", ".join(o.name for o in measured if o not in offers)
        why = f"without {gone} the rest moved the metric {spell_change(change)}, more than {used:.3%}"
        chosen.kept.update(dict.fromkeys((name for o in offers for name in o.unit.linears), why))
        return [], None, why

    def say_gradients(self, trained: Interval | None) -> str:
        """How gradients were judged."""
        if not self.training:
            return "none: serving"
        if not self.train:
            return "by the score"
        if trained is None:
            return f"by the score, and by paired runs of {self.train} steps, which no unit passed"
        return f"by the score, and by a paired run of {self.train} steps: {trained.value:+.4%} [{trained.low:+.4%}, {trained.high:+.4%}]"

    def without_worst(self, offer: Offer, chosen: Chosen, looked: Looked, alone: dict[str, Interval], exceeded: float) -> list[Offer]:  # fmt: skip
        """A chain without the linear that is predicted to cost most; nothing of a single one."""
        change = alone[offer.name]
        what = (
            f"the chain {offer.name}, of which this is predicted to cost most," if len(offer.unit.links) > 1 else "it"
        )
        why = f"swapped in, {what} moved the metric {spell_change(change)}, and all together exceeded {exceeded:.3%}"
        worst = max(offer.unit.linears, key=lambda name: predicted_harm(looked.sites[name], training=self.training))
        chosen.kept[worst] = why
        if offer.way != "chain" or len(offer.unit.links) == 1:
            return []
        parts = [part_of(offer, unit, looked, training=self.training) for unit in split_unit(offer.unit, {worst})]
        chosen.offers[:] = [*(o for o in chosen.offers if o is not offer), *parts]
        return parts

    def swap(self, offers: list[Offer], chosen: Chosen, looked: Looked, base: Losses) -> Interval:
        """The change of the metric with these units in low precision."""
        plan = self.make_plan(offers, chosen, looked, [], {}, {})
        with converted(self.task.model, plan):
            self.swapped = evaluate(self.task, self.task.held_out, self.metric, as_trained=self.training)
        return self.swapped.change_from(base)

    def note_columns(self, base: Losses, used: float) -> None:
        """Name tasks whose own loss changes by more than the margin while the loss as a whole does not: a rare label is a small part of it."""
        found = {} if self.swapped is None else self.swapped.changed_columns(base, used)
        self.notes += [f"column {number} of the loss, {share:.1%} of it, changes {spell_change(change)}: more than {used:.2%}, which holds for their mean; hint: metric= that returns the column that matters" for number, (share, change) in found.items()]  # fmt: skip

    def verify_speed(self, offers: list[Offer], chosen: Chosen, looked: Looked, mods: list[str], speeds: dict[str, Interval]) -> tuple[list[Offer], dict[str, float], Interval | None, str | None]:  # fmt: skip
        """The whole step, compiled, beside compiled 16 bits; units are dropped until it is not slower."""
        if (why := self.untimed) is not None:
            return offers, {}, None, why
        base, taken = dict(self.base), list(offers)
        if mods:
            base["bf16 layout"] = timing.whole_step(self.task, training=self.training, mode=None)
        for attempt in range(3):
            if not taken:
                break
            with converted(self.task.model, self.make_plan(taken, chosen, looked, [], {}, {})):
                if not self.training:
                    self._freeze()
                runs = dict(base)
                for mode in self.modes:
                    runs[f"loka{_spell_mode(mode)}"] = timing.whole_step(self.task, training=self.training, mode=mode)
                times = timing.time_in_turns(runs)
            medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
            best, mine = (
                min((n for n in medians if n.startswith(kind)), key=medians.__getitem__) for kind in ("bf16", "loka")
            )
            original = min((n for n in self.base), key=medians.__getitem__)
            if timing.compare(times, mine, best).value >= 1.0:
                self.note_host(runs, medians, mine, original)
                return taken, medians, timing.compare(times, mine, original), None
            if self.left < 0.2 * self.budget or len(taken) == 1 or attempt == 2:
                break
            slowest = min(taken, key=lambda o: speeds[o.name].value if o.name in speeds else 1.0)
            taken.remove(slowest)
            why = f"the whole step was {timing.compare(times, mine, best).value:.2f}x of 16 bits with it"
            chosen.kept.update(dict.fromkeys(slowest.unit.linears, why))
        note = "FP8 was not faster than compiled 16 bits as a whole step" if offers else "no unit is both safe and fast"
        for offer in taken:
            chosen.kept.update(dict.fromkeys(offer.unit.linears, note))
        if not mods:
            return [], {}, None, f"{note}: nothing is converted"
        times = timing.time_in_turns(base)
        medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
        original = min(self.base, key=medians.__getitem__)
        self.note_host(base, medians, "bf16 layout", original)
        return [], medians, timing.compare(times, "bf16 layout", original), None

    def note_host(self, runs: dict[str, timing.Captured], medians: dict[str, float], mine: str, original: str) -> None:
        """Keep what the host takes to launch the steps that are reported, and say so where that is what a step would wait for."""
        self.host = {name: run.host_microseconds for name, run in runs.items()}
        if said := timing.say_host(medians, self.host, mine, original):
            self.notes.append(said)

    def _freeze(self) -> None:
        from loka.placing import freeze_model

        freeze_model(self.task.model)

    def make_plan(self, offers: list[Offer], chosen: Chosen, looked: Looked, mods: list[str], speeds: dict[str, Interval], alone: dict[str, Interval]) -> Plan:  # fmt: skip
        """What was taken, with what was measured of it, and a word for every linear that was not."""
        evidence = {
            o.name: UnitEvidence(
                speedup=speeds.get(o.name),
                estimated=self.estimates.get(o.name),
                harm=o.harm,
                metric_change=alone.get(o.name),
            )
            for o in offers
        }
        units, sites = to_plan_parts(offers, looked, evidence, chosen.kept, training=self.training)
        timed = self.untimed is None
        return Plan(
            model=type(self.task.model).__name__,
            recipe="auto",
            target=self.device_name if timed else None,
            max_error=1.0,
            max_gradient_error=1.0,
            min_speedup=1.0 if timed else None,
            flops_of="sites",
            sites=sites,
            units=units,
            tables=self.tables,
            collectives=self.collectives,
            mods=mods,
            margin=self.margin,
            environment=capture_environment(device=self.device_name, threads=torch.get_num_threads()),
            notes=[] if timed else self.say_untimed(),
        )

    def say_untimed(self) -> list[str]:
        """What a plan without measured speeds rests on."""
        if self.estimator is None:
            return [f"made for accuracy only: no speed was measured on {self.device_name}"]
        return [
            f"the plan to try first on {self.estimator.target}: speeds are {self.estimator}; none was measured, so tune again there"
        ]

    def describe(self, offers: list[Offer], chosen: Chosen, looked: Looked, speeds: dict[str, Interval], alone: dict[str, Interval]) -> list[TunedUnit]:  # fmt: skip
        """A row for every unit and every linear that stays, for the record."""
        taken = {o.name for o in offers}
        rows = []
        for o in chosen.offers:
            reason = o.reason if o.name in taken else chosen.kept.get(o.unit.linears[0], "not taken")
            alarms = (
                [] if o.name in taken else [a.text for name in o.unit.linears for a in looked.sites[name].alarms[:1]]
            )
            rows.append(
                TunedUnit(
                    name=o.name, linears=o.unit.linears, way=o.way if o.name in taken else "high", flops_share=o.flops_share, reason=reason,
                    harm=o.harm, speedup=speeds.get(o.name), estimated=self.estimates.get(o.name), metric_change=alone.get(o.name), alarms=alarms,
                )
            )  # fmt: skip
        offered = {name for o in chosen.offers for name in o.unit.linears}
        total = sum(s.flops for s in looked.sites.values()) or 1.0
        for name, why in chosen.kept.items():
            if name not in offered:
                site = looked.sites[name]
                rows.append(TunedUnit(name=name, linears=[name], way="high", flops_share=site.flops / total, reason=why, alarms=[a.text for a in site.alarms[:2]]))  # fmt: skip
        return rows

    def give_back(self) -> None:
        """Captured steps hold their own memory: after tune the process has what the conversion needs."""
        self.base.clear()
        gc.collect()  # compiled steps and the graphs that hold them refer to each other
        if self.task.device.type == "cuda":
            torch.cuda.empty_cache()
            timing.return_workspaces()

    def with_conversion(self, record: Tuning, done: Any) -> Tuning:
        """The record with what runs now."""
        import msgspec

        return msgspec.structs.replace(record, conversion=done)
