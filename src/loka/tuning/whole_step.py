"""Whether the whole step is faster: compiled, in a CUDA graph, in turns with compiled 16 bits. Units leave until it is, and rewrites that make it slower."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loka.dispatch.choosing import Offer
from loka.lowp.chain_handing import AnotherPathError
from loka.placing import freeze_model
from loka.records import Interval
from loka.tuning import timing
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import converted
from loka.tuning.rehearsal import leave_chain
from loka.units.undisturbed import put_back

CLEAR = 1.1  # times as fast as 16 bits by itself: below it a unit may cost its neighbours more than it gains
NOISE = 1.01  # ratios of one run that differ by less do not differ
SLOWER = "FP8 was not faster than compiled 16 bits as a whole step"
LAYOUT = "bf16 layout"  # runs of the model in 16 bits with its mods


@dataclass(frozen=True)
class StepTimes:
    """The whole step, as it was timed.

    Args:
        medians: microseconds by run.
        host: what the host takes to launch each.
        speedup: of what is converted over the original.
        note: why there is none.
        compile_note: how to compile for it, where that is not the default.
        host_note: what becomes of it where steps are launched kernel by kernel, if that is much.
    """

    medians: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    speedup: Interval | None = None
    note: str | None = None
    compile_note: str | None = None
    host_note: str | None = None


def verify_speed(call: Call, selection: Selection, original: Mapping[str, timing.Captured]) -> StepTimes:
    """Time the whole step, compiled, beside compiled 16 bits; drop units until it is not slower.

    Args:
        call: whose step it is.
        selection: what is in.
        original: the step of the model as it was, captured, by compile mode.

    Returns:
        What was measured.
    """
    if call.untimed is not None:
        return StepTimes(note=call.untimed)
    base, offered, failed = dict(original), bool(selection.offers), ""
    try:
        base |= capture_steps(call, LAYOUT) if selection.mods else {}
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # what is converted is converted on top of it
        traceback.clear_frames(error.__traceback__)
        failed = f"rewritten by {', '.join(selection.mods)} the whole step fails where it is timed: {type(error).__name__}: {error}"
    tried: list[_Timed] = []
    while selection.offers and not failed:
        try:
            runs, times = _time_converted(call, selection, base)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of a compiler, or what no CUDA graph can hold: 16 bits went through both
            traceback.clear_frames(error.__traceback__)  # they hold its tensors
            failed = f"with FP8 in it the whole step fails where it is timed: {type(error).__name__}: {error}"
            break
        best, mine = (_fastest(times, kind) for kind in ("bf16", "loka"))
        ratio = timing.compare(times, mine, best).value
        tried.append(_Timed(ratio, selection.offers, _report(runs, times, mine, original)))
        fewer = _leave_slower(call, selection, tried)
        if not fewer:
            break
        selection.offers = fewer
    if tried and (found := _take_fastest(call, selection, tried)) is not None:
        return found
    note = failed or (_say_slower(call) if offered else "no unit is both safe and fast")
    for offer in selection.offers:
        selection.drop(offer, note)
    return _settle_layout(call, selection, base, original, note)


class _Timed(NamedTuple):
    """A whole step that was timed."""

    ratio: float  # speed-up over the fastest in 16 bits
    offers: list[Offer]
    report: StepTimes


def _leave_slower(call: Call, selection: Selection, tried: list[_Timed]) -> list[Offer]:
    """What to time next: the faster half of the units where the step was slower than 16 bits; once, those that gain clearly by themselves, where it was faster. Nothing where that is all, or time is short."""
    offers, ratio = tried[-1].offers, tried[-1].ratio
    speed = {o.name: selection.speeds[o.name].value if o.name in selection.speeds else 1.0 for o in offers}
    if ratio < 1.0:
        return sorted(offers, key=lambda o: -speed[o.name])[: len(offers) // 2] if call.left >= 0.2 * call.budget else []  # fmt: skip
    clear = [o for o in offers if speed[o.name] >= CLEAR or o.name not in selection.speeds]
    return clear if len(tried) == 1 and len(clear) < len(offers) and call.left >= 0.5 * call.budget else []


def _take_fastest(call: Call, selection: Selection, tried: list[_Timed]) -> StepTimes | None:
    """Of the steps that were timed the fastest, the one with more units where they differ by noise; None where 16 bits are faster than each."""
    best = tried[0]
    for other in tried[1:]:
        best = other if other.ratio > NOISE * best.ratio else best
    every = [name for offer in tried[0].offers for name in offer.unit.linears]
    if best.ratio < 1.0:
        selection.offers = []
        selection.chosen.kept.update(dict.fromkeys(every, _say_slower(call)))
        return None
    taken = {name for offer in best.offers for name in offer.unit.linears}
    why = f"the whole step was {tried[0].ratio:.2f}x of 16 bits with it, and {best.ratio:.2f}x without"
    selection.chosen.kept.update({name: why for name in every if name not in taken})
    selection.offers = best.offers
    return best.report


def _say_slower(call: Call) -> str:
    if call.cuda_graph:
        return SLOWER
    return f"{SLOWER} that is launched kernel by kernel; hint: cuda_graph=True, for one that is captured or compiled with mode=\"reduce-overhead\""  # fmt: skip


def _settle_layout(call: Call, selection: Selection, base: Mapping[str, timing.Captured], original: Mapping[str, timing.Captured], note: str) -> StepTimes:  # fmt: skip
    """Without FP8: the step in 16 bits as it is rewritten. Rewrites that nobody asked for leave where they make it slower, or fail."""
    if len(base) > len(original):
        with put_back(call.task.model):
            times = _time(call, base)
        found = _report(base, times, _fastest(times, LAYOUT), original)
        if found.speedup is None or found.speedup.value >= 1.0 or not selection.may_leave_mods:
            return found
        note = f"{note}, and in 16 bits {', '.join(selection.mods)} makes the step {found.speedup.value:.2f}x"
    if selection.may_leave_mods:
        selection.mods = []
    return StepTimes(note=note if selection.mods else f"{note}: nothing is converted")


def _time_converted(call: Call, selection: Selection, base: Mapping[str, timing.Captured]) -> tuple[dict[str, timing.Captured], dict[str, list[float]]]:  # fmt: skip
    """The whole step with what is in, in every way to compile, in turns with the steps it is compared with. A chain that it takes another path through is taken apart."""
    model = call.task.model
    while True:
        try:
            with converted(model, selection.to_plan(call)):
                if not call.training:
                    freeze_model(model)
                runs = {**base, **capture_steps(call, "loka")}
                with put_back(model):  # a replay runs what writes to buffers
                    return runs, _time(call, runs)
        except AnotherPathError as error:
            leave_chain(call, selection, error)


def _time(call: Call, runs: Mapping[str, timing.Captured]) -> dict[str, list[float]]:
    """Microseconds of every run, in turns, as it will be run: what is in no CUDA graph takes as long as its launch at least."""
    times = timing.time_in_turns(runs)
    if call.cuda_graph:
        return times
    return {name: [max(one, runs[name].host_microseconds) for one in taken] for name, taken in times.items()}


def capture_steps(call: Call, kind: str) -> dict[str, timing.Captured]:
    """The whole step, compiled in every way and captured, by name. A way that is not the default and fails is left out, and a note says so.

    Args:
        call: whose step it is.
        kind: what runs are called ("bf16", `LAYOUT`, "loka").

    Returns:
        What replays each.
    """
    found = {}
    for compiler in call.compilers:
        try:
            found[name_run(kind, compiler)] = timing.whole_step(call.task, training=call.training, compiler=compiler)
        except (torch.OutOfMemoryError, torch.AcceleratorError, timing.NotCapturedError, AnotherPathError):
            raise
        except Exception as error:
            if not compiler:
                raise
            traceback.clear_frames(error.__traceback__)
            note = f"{name_run(kind, compiler)} is not among what was timed: {type(error).__name__}: {error}"
            if note not in call.notes:
                call.notes.append(note)
    return found


def name_run(kind: str, compiler: str) -> str:
    """What a run is called in the record: its precision, and how it was compiled where that is not the default."""
    return f"{kind} {compiler}".rstrip()


def say_compiler(name: str) -> str | None:
    """How to compile what was fastest, where that is not the default.

    Args:
        name: of the run (`name_run`).

    Returns:
        A sentence, or None.

    Example:
        >>> say_compiler("loka max-autotune")
        'this speed-up is of torch.compile(model, mode="max-autotune-no-cudagraphs"): compile so'
    """
    found = next((given for compiler, given in timing.COMPILERS.items() if compiler and name.endswith(f" {compiler}")), None)  # fmt: skip
    given = ", ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in (found or {}).items())  # fmt: skip
    return f"this speed-up is of torch.compile(model, {given}): compile so" if given else None


def _report(runs: Mapping[str, timing.Captured], times: dict[str, list[float]], mine: str, original: Mapping[str, timing.Captured]) -> StepTimes:  # fmt: skip
    """What was measured of a step, beside the faster original."""
    medians, host = _medians(times), {name: run.host_microseconds for name, run in runs.items()}
    before = min(original, key=medians.__getitem__)
    said = timing.say_host(medians, host, mine, before)
    return StepTimes(
        medians, host, timing.compare(times, mine, before), compile_note=say_compiler(mine), host_note=said
    )


def _fastest(times: Mapping[str, list[float]], kind: str) -> str:
    """The run of a kind with the smallest median."""
    medians = _medians(times)
    return min((name for name in medians if name.startswith(kind)), key=medians.__getitem__)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}
