"""One call of tune, phase by phase: compile the original, look, time units, swap them in, time the whole step, write the record.

Every phase changes the selection that the phase before it left, and asks the evidence on disk first.
"""

import gc
import math
import traceback
from dataclasses import replace

import torch

from loka import mods as mods_room
from loka.dispatch.choosing import Limits, make_offers
from loka.probe.paired import Losses, has_drifted, spell_change
from loka.records import CollectivePlan, Interval, TablePlan
from loka.records.tuning import TunedUnit, Tuning
from loka.tuning import choosing, metric, rehearsal, timing, whole_step
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import evaluate, evaluate_averaged
from loka.tuning.gradients import describe, verify_gradients
from loka.tuning.looking import look, name_unseen
from loka.tuning.tables import choose_parts, describe_part
from loka.tuning.whole_step import StepTimes

EARLY = 0.995  # of the loss of a constant prediction: a model that is above it has learned nothing yet


class Session:
    """One call, phase by phase.

    Args:
        call: what was asked.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.original: dict[str, timing.Captured] = {}  # the step as it was, by compile mode
        self._verified: set[str] = set()  # units whose gradients were compared
        if call.evidence.resumed:
            call.notes.append("went on from evidence of an earlier call")

    def time_original(self) -> None:
        """Compile and capture the model as it is, before anything changes it."""
        call = self.call
        call.untimed = timing.can_time(call.task.device)
        if call.untimed is not None:
            return
        with call.phase("compile 16 bits"):
            try:
                self.original = whole_step.capture_steps(call, "bf16")
            except timing.NotCapturedError as error:
                call.untimed = str(error)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # what is wrong with the step itself, and not with compiling it, the look raises
                traceback.clear_frames(error.__traceback__)  # they hold its tensors
                call.untimed = f"the step cannot be compiled: {type(error).__name__}: {error}"

    def apply_mods(self, asked: list[str]) -> list[str]:
        """Rewrites of the layout that keep the function, and what was asked for; the names of those that changed something."""
        task, names = self.call.task, [*asked, *mods_room.FREE]
        example = task.example()
        if example is None:
            if asked:
                raise ValueError(f"architecture=True: the step calls parts of {type(task.model).__name__} and never itself, and mods must see a call of it; hint: a forward that does what the step does")  # fmt: skip
            self.call.notes.append(f"the step calls parts of {type(task.model).__name__} and never itself: rewrites of the layout, which must see a call of it, are left out")  # fmt: skip
            return []
        done = mods_room.apply(task.model, [mods_room.parse(name) for name in names], example=example)
        changed = {change.mod for change in done.summary.changed}
        taken = [name for name in names if name in changed]
        if taken != names:
            mods_room.revert(task.model)
            if taken:
                mods_room.apply(task.model, [mods_room.parse(name) for name in taken], example=example)
        return taken

    def run(self, mods: list[str], *, may_leave_mods: bool) -> Tuning:
        """Look, choose, verify; `mods` are those the model has, which may leave where nobody asked for them."""
        call = self.call
        call.notes += name_unseen(call.task.model)
        with call.phase("look"):
            looked = look(call.task, training=call.training, progress=call.progress)
            base = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
            _check_repeatable(call, base)
            _warn_if_early(call, base)
        chosen = make_offers(
            looked, limits=Limits.before_swapping(call.margin, training=call.training), training=call.training
        )
        selection = Selection(looked, chosen, base, mods, call.margin, list(chosen.offers), may_leave_mods=may_leave_mods)  # fmt: skip
        if call.training:
            rehearsal.rehearse(call, selection)
        with call.phase("time units"):
            choosing.choose_faster(call, selection)
        with call.phase("verify the metric"):
            metric.verify_metric(call, selection)
        if call.training:
            with call.phase("verify the gradients"):
                self._verify_gradients(selection)
        measured, trained = selection.offers, None
        if call.train:
            with call.phase("train a little"):
                trained = rehearsal.verify_training(call, selection)
        with call.phase("verify the step"):
            paired = selection.offers
            if paired != measured:
                metric.hold_margin(call, selection, selection.used)
            step = self._settle(selection)
            launched = "speeds are of steps that are launched kernel by kernel, as cuda_graph=False asks: the longer of what the host and the device take" if step.medians and not call.cuda_graph else None  # fmt: skip
            call.notes += [note for note in (launched, step.compile_note, step.host_note) if note]
            metric.note_margin(call, selection)
            if trained is not None and selection.offers != paired:
                call.notes.append(f"the paired run of training had {', '.join(o.name for o in paired if o not in selection.offers)} too, which left since")  # fmt: skip
        parts: list[TablePlan | CollectivePlan] = []
        if call.choose_tables or call.choose_collectives:
            with call.phase("choose tables and collectives"):
                parts = choose_parts(call, selection)
        if selection.change is not None:
            metric.note_columns(call, selection)
        return _record(call, selection, step, trained, parts)

    def _verify_gradients(self, selection: Selection) -> None:
        """Drop units whose gradients are wrong here until none is; what leaves, or is taken apart, has the metric measured again."""
        while not all(describe(offer) in self._verified for offer in selection.offers):
            before = selection.offers
            verify_gradients(self.call, selection, self._verified)
            if selection.offers != before:
                metric.hold_margin(self.call, selection, selection.used)

    def _settle(self, selection: Selection) -> StepTimes:
        """Drop units until the step is not slower and the metric is within the margin, of the same units: whatever leaves for one of them, the other is measured again."""
        while True:
            if self.call.training:
                self._verify_gradients(selection)
            before = selection.offers
            step = whole_step.verify_speed(self.call, selection, self.original)
            timed = selection.offers
            if timed != before:
                metric.hold_margin(self.call, selection, selection.used)
            if selection.offers == timed:
                return step
            if self.call.left <= 0:
                why = f"the budget of {self.call.budget:g} s was over before what is within the margin could be timed"
                for offer in selection.offers:
                    selection.drop(offer, why)
                selection.change = None
                step = whole_step.verify_speed(self.call, selection, self.original)
                return step if step.note is None else replace(step, note=f"{why}: nothing is converted")

    def give_back(self) -> None:
        """Captured steps hold their own memory: after tune the process has what the conversion needs."""
        self.original.clear()
        gc.collect()  # compiled steps and the graphs that hold them refer to each other
        if self.call.task.device.type == "cuda":
            torch.cuda.empty_cache()
            timing.return_workspaces()


def _check_repeatable(call: Call, base: Losses) -> None:
    """Run the held-out batches once more: what is compared later differs by the arithmetic alone only where this changes nothing."""
    if not math.isfinite(base.mean):
        call.notes.append("the metric of the held-out batches is not finite in high precision, so nothing can be compared with it; hint: leave out the batches where it is not")  # fmt: skip
        return
    again = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    if (change := has_drifted(again, base, call.margin)) is not None:
        raise ValueError(f"run twice in high precision, the same batches change the metric {spell_change(change)}: expected the same; do the step, the metric or the model keep a state of their own, or draw random numbers from a generator of their own?")  # fmt: skip


def _warn_if_early(call: Call, base: Losses) -> None:
    """A model that is no better than its own mean prediction for everybody has learned nothing, and has no sites worth judging."""
    metric, averaged = base, None
    if call.metric is not None:
        averaged = evaluate_averaged(call.task, call.metric, as_trained=call.training)
        base = evaluate(call.task, call.task.held_out, as_trained=call.training)
    constant = evaluate_averaged(call.task, as_trained=call.training)
    if constant is not None and torch.equal(constant.values, base.values):
        return  # the loss is computed inside the model, so that nothing can be said
    if constant is None or not (math.isfinite(base.mean) and constant.mean > 0):
        return
    if base.mean < EARLY * constant.mean:
        if averaged is not None and metric.mean > averaged.mean:
            call.notes.append(f"is a higher metric better? It is {metric.mean:.4f}, and {averaged.mean:.4f} where every example gets the model's mean prediction, which the loss calls worse. Lower was taken for better; hint: a metric of 1 - AUC, or with a minus")  # fmt: skip
        return
    call.notes.append(f"too early: the loss {base.mean:.4f} is no better than {constant.mean:.4f}, which the model's mean prediction has when every example gets it; train until it is below {EARLY * constant.mean:.4f}, then tune again")  # fmt: skip


def _record(call: Call, selection: Selection, step: StepTimes, trained: Interval | None, parts: list[TablePlan | CollectivePlan]) -> Tuning:  # fmt: skip
    base = selection.base
    return Tuning(
        model=type(call.task.model).__name__,
        target="train" if call.training else "serve",
        margin=call.margin,
        used_margin=selection.used,
        units=[*_describe(selection), *(describe_part(part) for part in parts)],
        plan=selection.to_plan(call, mods=selection.mods),
        step_microseconds=step.medians,
        host_microseconds=step.host,
        speedup=step.speedup,
        speed_note=step.note,
        estimate=choosing.estimate(call, selection),
        metric=base.mean if math.isfinite(base.mean) else None,
        metric_change=selection.change,
        metric_unit="examples" if base.per_example else "batches",
        gradients=_say_gradients(call, trained, compared=bool(selection.offers)),
        training_change=trained,
        seconds=call.seconds,
        notes=call.notes,
        environment=call.environment,
    )


def _say_gradients(call: Call, trained: Interval | None, *, compared: bool) -> str:
    """How gradients were judged."""
    if not call.training:
        return "none: serving"
    ways = ["by the score"]
    if compared and not any(note.startswith("gradients were not compared") for note in call.notes):
        ways.append("by a backward pass beside 16 bits")
    if call.train and trained is None:
        ways.append(f"by paired runs of {call.train} steps, which no unit passed")
    elif call.train:
        ways.append(f"by a paired run of {call.train} steps: {trained:+.4%}")
    return ", and ".join(ways)


def _describe(selection: Selection) -> list[TunedUnit]:
    """A row for every unit and every linear that stays, for the record."""
    taken, sites, kept = {o.name for o in selection.offers}, selection.looked.sites, selection.chosen.kept
    rows = []
    for o in selection.chosen.offers:
        runs = o.name in taken
        rows.append(
            TunedUnit(
                name=o.name, linears=o.unit.linears, way=o.way if runs else "high", flops_share=o.flops_share,
                reason=o.reason if runs else kept.get(o.unit.linears[0], "not taken"), harm=o.harm,
                speedup=selection.speeds.get(o.name), estimated=selection.estimates.get(o.name), metric_change=selection.alone.get(o.name),
                alarms=[] if runs else [a.text for name in o.unit.linears for a in sites[name].alarms[:1]],
            )
        )  # fmt: skip
    offered = {name for o in selection.chosen.offers for name in o.unit.linears}
    total = sum(s.flops for s in sites.values()) or 1.0
    for name, why in kept.items():
        if name not in offered:
            site = sites[name]
            rows.append(TunedUnit(name=name, linears=[name], way="high", flops_share=site.flops / total, reason=why, alarms=[a.text for a in site.alarms[:2]]))  # fmt: skip
    return rows
