"""Time the whole step, compiled and in a CUDA graph, in turns with the compiled 16-bit step.

Units, and rewrites that make it slower, are dropped until it is faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from loka.dispatch.choosing import Offer
from loka.lowp.chain_handing import AnotherPathError
from loka.placing import converted, freeze_model
from loka.records import Interval
from loka.tuning import timing
from loka.tuning.attempt import attempt, spell_error
from loka.tuning.call import Call, Selection
from loka.tuning.rehearsal import replace_chain_by_linears
from loka.units.undisturbed import put_back

CLEAR = 1.1  # times as fast as 16-bit when timed alone; below that, a unit may cost its neighbours more than it gains
NOISE = 1.01  # smaller ratios between two runs are noise
SLOWER = "the whole step was not faster in FP8 than in compiled 16-bit"
LAYOUT = "bf16 layout"  # name of runs of the 16-bit model with its mods


@dataclass(frozen=True)
class StepTimes:
    """Timings of the whole step.

    Args:
        medians: microseconds by run.
        host: microseconds that the host needs to launch each run.
        speedup: of the converted model over the original.
        note: why there is no speed-up.
        compile_note: how to compile for it, if not with the default.
        host_note: the speed-up if steps are launched kernel by kernel, if that is much less.
    """

    medians: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    speedup: Interval | None = None
    note: str | None = None
    compile_note: str | None = None
    host_note: str | None = None


def verify_speed(call: Call, selection: Selection, original: Mapping[str, timing.Captured]) -> StepTimes:
    """Time the whole compiled step against the compiled 16-bit step, and drop units until it is not slower.

    Args:
        call: provides the step and the budget.
        selection: its offers, and `mods`, are reduced.
        original: captured steps of the original model, by compile mode.

    Returns:
        The timings.
    """
    if call.untimed is not None:
        return StepTimes(note=call.untimed)
    base, offered, failed = dict(original), bool(selection.offers), ""
    layout = attempt(partial(capture_steps, call, LAYOUT)) if selection.mods else {}
    if isinstance(layout, Exception):  # offers are converted on top of the mods, so these cannot be timed either
        failed = (
            f"rewritten by {', '.join(selection.mods)}, the whole step fails when it is timed: {spell_error(layout)}"
        )
    else:
        base |= layout
    tried: list[_Timed] = []
    while selection.offers and not failed:
        timed = attempt(partial(_time_converted, call, selection, base))
        if isinstance(timed, Exception):  # a failing compiler or CUDA graph capture; the 16-bit step passed both
            failed = f"with FP8, the whole step fails when it is timed: {spell_error(timed)}"
            break
        runs, times = timed
        best, mine = (_fastest(times, kind) for kind in ("bf16", "loka"))
        ratio = timing.compare(times, mine, best).value
        tried.append(_Timed(ratio, selection.offers, _report(runs, times, mine, original)))
        fewer = _choose_fewer(call, selection, tried)
        if not fewer:
            break
        selection.offers = fewer
    if tried and (found := _take_fastest(call, selection, tried)) is not None:
        return found
    note = failed or (_say_slower(call, tried) if offered else "no unit is both safe and fast")
    for offer in selection.offers:
        selection.drop(offer, note)
    return _settle_layout(call, selection, base, original, note)


class _Timed(NamedTuple):
    """A whole step that was timed."""

    ratio: float  # speed-up over the fastest 16-bit step
    offers: list[Offer]
    report: StepTimes


def _choose_fewer(call: Call, selection: Selection, tried: list[_Timed]) -> list[Offer]:
    """Return the offers to time next, or none if there are no more to try or time is short.

    If the step was slower than 16-bit: the faster half of the units. If it was faster: once, the units that are clearly
    faster alone.
    """
    offers, ratio = tried[-1].offers, tried[-1].ratio
    speed = {o.name: selection.speeds[o.name].value if o.name in selection.speeds else 1.0 for o in offers}
    if ratio < 1.0:
        return sorted(offers, key=lambda o: -speed[o.name])[: len(offers) // 2] if call.left >= 0.2 * call.budget else []  # fmt: skip
    clear = [o for o in offers if speed[o.name] >= CLEAR or o.name not in selection.speeds]
    return clear if len(tried) == 1 and len(clear) < len(offers) and call.left >= 0.5 * call.budget else []


def _take_fastest(call: Call, selection: Selection, tried: list[_Timed]) -> StepTimes | None:
    """Select the fastest timed step, or the one with more units if they differ by noise; None if 16-bit is faster."""
    best = tried[0]
    for other in tried[1:]:
        best = other if other.ratio > NOISE * best.ratio else best
    every = [name for offer in tried[0].offers for name in offer.unit.linears]
    if best.ratio < 1.0:
        selection.offers = []
        selection.chosen.kept.update(dict.fromkeys(every, _say_slower(call, tried)))
        return None
    taken = {name for offer in best.offers for name in offer.unit.linears}
    why = f"the whole step was {tried[0].ratio:.2f}x as fast as 16-bit with it, and {best.ratio:.2f}x without it"
    selection.chosen.kept.update({name: why for name in every if name not in taken})
    selection.offers = best.offers
    return best.report


def _say_slower(call: Call, tried: list[_Timed]) -> str:
    said = f"{SLOWER} ({max(one.ratio for one in tried):.2f}x at best)" if tried else SLOWER
    if call.cuda_graph:
        return said
    return (
        f"{said} when launched kernel by kernel; hint: cuda_graph=True, if your step is captured or compiled with "
        'mode="reduce-overhead"'
    )


def _settle_layout(
    call: Call,
    selection: Selection,
    base: Mapping[str, timing.Captured],
    original: Mapping[str, timing.Captured],
    note: str,
) -> StepTimes:
    """Without FP8: time the rewritten 16-bit step. Drop mods that the user did not ask for if it is slower or fails."""
    if len(base) > len(original):
        with put_back(call.task.model):
            times = _time(call, base)
        found = _report(base, times, _fastest(times, LAYOUT), original)
        if found.speedup is None or found.speedup.value >= 1.0 or not selection.may_drop_mods:
            return found
        note = f"{note}, and in 16-bit {', '.join(selection.mods)} makes the step {found.speedup.value:.2f}x as fast"
    if selection.may_drop_mods:
        selection.mods = []
    return StepTimes(note=note if selection.mods else f"{note}: nothing is converted")


def _time_converted(
    call: Call, selection: Selection, base: Mapping[str, timing.Captured]
) -> tuple[dict[str, timing.Captured], dict[str, list[float]]]:
    """Time the whole step with all offers, in every compile mode, in turns with the steps it is compared with.

    A chain that the step takes another path through is taken apart.
    """
    model = call.task.model
    while True:
        try:
            with converted(model, selection.to_plan(call)):
                if not call.training:
                    freeze_model(model)
                runs = {**base, **capture_steps(call, "loka")}
                with put_back(model):  # replays write to buffers
                    return runs, _time(call, runs)
        except AnotherPathError as error:
            replace_chain_by_linears(call, selection, error)


def _time(call: Call, runs: Mapping[str, timing.Captured]) -> dict[str, list[float]]:
    """Time every run in turns, in microseconds. Outside a CUDA graph, a step takes at least its launch time."""
    times = timing.time_in_turns(runs)
    if call.cuda_graph:
        return times
    return {name: [max(one, runs[name].host_microseconds) for one in taken] for name, taken in times.items()}


def capture_steps(call: Call, kind: str) -> dict[str, timing.Captured]:
    """Compile the whole step in every mode and capture it. Return the steps by run name, which begins with `kind`.

    If a mode other than the default fails, it is left out and a note says so.
    """
    found = {}
    for compiler in call.compilers:
        raised = (timing.NotCapturedError, AnotherPathError) if compiler else (Exception,)
        run = partial(timing.whole_step, call.task, training=call.training, compiler=compiler)
        step = attempt(run, raised=raised)
        if isinstance(step, Exception):
            note = f"{name_run(kind, compiler)} was not timed: {spell_error(step)}"
            call.notes += [note] if note not in call.notes else []
        else:
            found[name_run(kind, compiler)] = step
    return found


def name_run(kind: str, compiler: str) -> str:
    """Return the name of a run in the record: its precision, and its compile mode unless that is the default."""
    return f"{kind} {compiler}".rstrip()


def say_compiler(name: str) -> str | None:
    """Say how to compile a run (named by `name_run`); None if it was compiled with the default.

    Example:
        >>> say_compiler("loka max-autotune")
        'this speed-up was measured with torch.compile(model, mode="max-autotune-no-cudagraphs"): compile it likewise'
    """
    for compiler, options in timing.COMPILERS.items():
        if compiler and name.endswith(f" {compiler}"):
            given = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in options.items())
            return f"this speed-up was measured with torch.compile(model, {given}): compile it likewise"
    return None


def _report(
    runs: Mapping[str, timing.Captured],
    times: dict[str, list[float]],
    mine: str,
    original: Mapping[str, timing.Captured],
) -> StepTimes:
    """Compare a timed step with the fastest original."""
    medians, host = _medians(times), {name: run.host_microseconds for name, run in runs.items()}
    before = min(original, key=medians.__getitem__)
    said = timing.say_host(medians, host, mine, before)
    return StepTimes(
        medians, host, timing.compare(times, mine, before), compile_note=say_compiler(mine), host_note=said
    )


def _fastest(times: Mapping[str, list[float]], kind: str) -> str:
    """Return the run of a kind with the smallest median."""
    medians = _medians(times)
    return min((name for name in medians if name.startswith(kind)), key=medians.__getitem__)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}
