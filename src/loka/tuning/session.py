"""The phases of a `loka.tune` call, in order: `Session.run` calls one after the other.

    compile the original   the baseline of every timing
    look                   find units, score what each way of running them does to the loss, make offers
    rehearse               one step with all offers
    verify the kernels     judge every kernel call of a step, at its own shape
    time units             drop those that are not faster
    verify the metric      swap units in, alone and together
    verify the gradients   one backward pass against 16-bit and against the reference
    paired training        on request
    verify the step        time the whole step; gradients and metric again if units are dropped
    record

Each phase narrows the selection that the one before it left. A measurement that is already on disk is not repeated.
"""

import gc
import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from loka.dispatch.choosing import Limits, Offer, make_offers
from loka.placing.judging import Judge
from loka.probe.paired import Losses, has_drifted, spell_change
from loka.records import CollectivePlan, Interval, TablePlan
from loka.records.tuning import TunedUnit, Tuning
from loka.tuning import choosing, metric, rehearsal, timing, whole_step
from loka.tuning.attempt import attempt, spell_error
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import evaluate, evaluate_averaged
from loka.tuning.gradients import describe, verify_gradients
from loka.tuning.kernels import verify_kernels
from loka.tuning.layout import apply_mods
from loka.tuning.looking import describe_unseen_products, look
from loka.tuning.tables import choose_parts, describe_part
from loka.tuning.whole_step import StepTimes

EARLY = 0.995  # a model whose loss is above this share of a constant prediction's loss has learned nothing yet


class Session:
    """Run the phases of one call.

    Args:
        call: the arguments of `loka.tune`.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.original: dict[str, timing.Captured] = {}  # the captured steps of the unmodified model, by compile mode
        self.given: Losses | None = None  # held-out losses without tune's own rewrites; None if it made none
        self._verified: set[str] = set()  # units whose gradients have passed
        self._sound: set[str] = set()  # units whose kernels have passed
        self._judge = Judge(call.task.device, call.notes, tell=partial(call.progress, "verify the kernels"))
        if call.evidence.resumed:
            call.notes.append("resumed from the evidence of an earlier call")
        if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
            call.notes.append(
                f"chosen on rank {dist.get_rank()} of {ranks} alone, others may choose differently: "
                "convert all of them by one plan"
            )

    def time_original(self) -> None:
        """Compile and capture the step of the unmodified model. If that fails, `call.untimed` says why."""
        call = self.call
        call.untimed = timing.can_time(call.task.device)
        if call.untimed is not None:
            return
        with call.phase("compile the baseline"):
            found = attempt(partial(whole_step.capture_steps, call, "bf16"))
            if isinstance(found, timing.NotCapturedError):
                call.untimed = str(found)
            elif isinstance(found, Exception):  # if the step itself is broken, look() raises its error
                call.untimed = f"the step cannot be compiled: {spell_error(found)}"
            else:
                self.original = found

    def apply_mods(self, asked: list[str]) -> list[str]:
        """Apply layout rewrites that keep the function, and the `asked` mods. Return those that changed something."""
        names, self.given = apply_mods(self.call, asked, self._judge)
        return names

    def run(self, mods: list[str], *, may_drop_mods: bool) -> Tuning:
        """Look, choose, verify, and return the record. `mods` are those the model has now.

        With `may_drop_mods` they may be dropped if they do not pay off: tune applied them, and the user did not ask.
        """
        call = self.call
        with call.phase("look"):
            selection = self._look(mods, may_drop_mods)
        call.notes += [*call.task.notes, *describe_unseen_products(call.task.model)]
        rehearsal.rehearse(call, selection)
        with call.phase("verify the kernels"):
            verify_kernels(call, selection, self._judge, self._sound)
        with call.phase("time units"):
            choosing.choose_faster(call, selection)
        with call.phase("verify the metric"):
            metric.verify_metric(call, selection)
        if call.training:
            with call.phase("verify the gradients"):
                self._verify_gradients(selection)
        before_training, trained = selection.offers, None
        if call.train:
            with call.phase("paired training"):
                trained = rehearsal.verify_training(call, selection)
        with call.phase("verify the step"):
            step = self._verify_step(selection, before_training, trained)
        if not selection.offers and selection.mods:
            metric.judge_rewrites(call, selection)
        parts: list[TablePlan | CollectivePlan] = []
        if call.choose_tables or call.choose_collectives:
            with call.phase("choose tables and collectives"):
                parts = choose_parts(call, selection)
        if selection.change is not None:
            metric.note_columns(call, selection)
        return _record(call, selection, step, trained, parts, len(self._judge.judged))

    def _look(self, mods: list[str], may_drop_mods: bool) -> Selection:
        """Observe the model and select every offer that its score allows."""
        call = self.call
        looked = look(call.task, training=call.training, progress=call.progress)
        base = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
        _check_repeatable(call, base)
        _warn_if_early(call, base)
        limits = Limits.before_swapping(call.margin, training=call.training)
        return Selection(
            looked,
            make_offers(looked, limits=limits, training=call.training),
            base=base,
            given=self.given or base,
            mods=mods,
            used=call.margin,
            may_drop_mods=may_drop_mods,
        )

    def _verify_step(self, selection: Selection, before_training: list[Offer], trained: Interval | None) -> StepTimes:
        """Settle the selection by the time of the whole step, and note what its times and verdicts hold for."""
        call, offered = self.call, selection.offers  # those that the paired training run ended with
        if offered != before_training:
            metric.hold_margin(call, selection, selection.used)
        step = self._settle(selection)
        if step.medians and not call.cuda_graph:
            call.notes.append(
                "speeds are of steps launched kernel by kernel, since cuda_graph=False: the longer of host and device time"
            )
        call.notes += [note for note in (step.compile_note, step.host_note) if note]
        metric.note_margin(call, selection)
        if trained is not None and selection.offers != offered:
            left = ", ".join(offer.name for offer in offered if offer not in selection.offers)
            call.notes.append(f"the paired training run also included {left}, which were dropped later")
        return step

    def _verify_gradients(self, selection: Selection) -> None:
        """Drop units with wrong gradients until none is left. After every change the metric is measured again."""
        while not all(describe(offer) in self._verified for offer in selection.offers):
            before = selection.offers
            verify_gradients(self.call, selection, self._verified)
            if selection.offers != before:
                metric.hold_margin(self.call, selection, selection.used)

    def _verify_kernels(self, selection: Selection) -> None:
        """Judge kernels that the selection runs only since units were taken apart or put back."""
        before = selection.offers
        verify_kernels(self.call, selection, self._judge, self._sound)
        if selection.offers != before:
            metric.hold_margin(self.call, selection, selection.used)

    def _settle(self, selection: Selection) -> StepTimes:
        """Drop units until the step is not slower and the metric is within the margin, both measured on the same units.

        When a unit is dropped because of one of the two, the other is measured again.
        """
        while True:
            self._verify_kernels(selection)
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
                why = (
                    f"the budget of {self.call.budget:g} s ran out before the units that are within the margin could "
                    "be timed as a whole step"
                )
                for offer in selection.offers:
                    selection.drop(offer, why)
                selection.change = None
                step = whole_step.verify_speed(self.call, selection, self.original)
                return step if step.note is None else replace(step, note=f"{why}: nothing is converted")

    def give_back(self) -> None:
        """Free the captured steps and their memory."""
        self.original.clear()
        gc.collect()  # compiled steps and their graphs form reference cycles
        if self.call.task.device.type == "cuda":
            torch.cuda.empty_cache()
            timing.return_workspaces()


def _check_repeatable(call: Call, base: Losses) -> None:
    """Evaluate the held-out batches again and raise if the metric changed: comparisons assume a deterministic run."""
    if not math.isfinite(base.mean):
        call.notes.append(
            "the metric of the held-out batches is not finite in high precision, so nothing can be compared with it; "
            "hint: leave out the batches where it is not finite"
        )
        return
    again = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    if (change := has_drifted(again, base, call.margin)) is not None:
        raise ValueError(
            f"the same batches, run twice in high precision, changed the metric {spell_change(change)}, "
            "expected no change; hint: the step, the metric or the model may keep state, or use a random generator "
            "of its own"
        )


def _warn_if_early(call: Call, base: Losses) -> None:
    """Add a note if the model is no better than its own mean prediction, since an untrained model cannot be judged.

    With a metric of the user's, also add a note if the metric seems to be one where higher is better.
    """
    metric, averaged = base, None
    if call.metric is not None:
        averaged = evaluate_averaged(call.task, call.metric, as_trained=call.training)
        base = evaluate(call.task, call.task.held_out, as_trained=call.training)
    constant = evaluate_averaged(call.task, as_trained=call.training)
    if constant is not None and torch.equal(constant.values, base.values):
        return  # the model computes the loss itself, so averaging its outputs tells nothing
    if constant is None or not (math.isfinite(base.mean) and constant.mean > 0):
        return
    if base.mean < EARLY * constant.mean:
        if averaged is not None and metric.mean > averaged.mean:
            call.notes.append(
                f"is a higher metric better? It is {metric.mean:.4f}, and {averaged.mean:.4f} if every example gets "
                "the model's mean prediction, which has the worse loss. Lower was assumed to be better; hint: "
                "return 1 - AUC, or the negative of the metric"
            )
        return
    call.notes.append(
        f"too early: the loss {base.mean:.4f} is no better than {constant.mean:.4f}, the loss if every example gets "
        f"the model's mean prediction; train until it is below {EARLY * constant.mean:.4f}, then tune again"
    )


def _record(
    call: Call,
    selection: Selection,
    step: StepTimes,
    trained: Interval | None,
    parts: list[TablePlan | CollectivePlan],
    kernels: int,
) -> Tuning:
    """Make the record: `trained` is the change by the paired training run, `kernels` how many calls were judged."""
    base = selection.given
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
        kernels=kernels,
        seconds=call.seconds,
        notes=call.notes,
        environment=call.environment,
        arguments={**call.arguments, "evidence": call.evidence.fingerprint[:16], "losses": base.digest},
    )


def _say_gradients(call: Call, trained: Interval | None, *, compared: bool) -> str:
    """Say how gradients were judged."""
    if not call.training:
        return "none: serving"
    ways = ["by the score"]
    if compared and not any(note.startswith("gradients were not compared") for note in call.notes):
        ways.append("by a backward pass compared with 16-bit gradients")
    if call.train and trained is None:
        ways.append(f"by paired runs of {call.train} steps, which no unit passed")
    elif call.train:
        ways.append(f"by a paired run of {call.train} steps: {trained:+.4%}")
    return ", and ".join(ways)


def _describe(selection: Selection) -> list[TunedUnit]:
    """Return a row of the record for every unit, and for every linear that is in none."""
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
    for name, why in kept.items():
        if name not in offered:
            rows.append(
                TunedUnit(
                    name=name,
                    linears=[name],
                    way="high",
                    flops_share=selection.looked.share_of(name),
                    reason=why,
                    alarms=[a.text for a in sites[name].alarms[:2]],
                )
            )
    return rows
