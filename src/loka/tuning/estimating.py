"""Estimate how fast a unit would be on a GPU that is not present, with an error bar.

An estimate is never mixed with measurements: it is labelled, and kept in separate fields.

Chains are estimated from units that `loka.tune` timed on the device (shipped with the package): rows M, layers K -> N,
forward or forward and backward, and the speed-up over compiled bf16. Both times of that ratio are modelled as a
roofline, summed over layers and GEMMs (g = 1, in training 3), with F = 2 M K N:

    t16 = g (F / P16 + c16) + g 2 (MK + NK + MN) / B + w g 4 MN / B
    t8  = g (F / P8  + c8 ) + g   (MK + NK + MN) / B + weights and transposes in training
                                                     + w (input and output of the chain in 16-bit) / B

The last term of t16 is the kernel for bias and activation. The seven parameters P16, P8, B, c16, c8 (one for training,
one for serving) and w are fitted to the logarithms of the measured ratios, with a prior near what the hardware does,
since ratios alone do not fix a scale. The error is leave-one-out: every measured unit is predicted from all the others.
An interval covers nine of ten of these errors, and is twice as wide (in logarithms) for a unit that is smaller or
larger than any measured one. K and N are rounded up to a multiple of 16 on both sides: an expert would pad bf16 too.

A linear that runs alone under a recipe is estimated from the performance database instead (`loka.tuning.row_fits`).
"""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import nn

from loka.dispatch import RECIPES
from loka.dispatch.rows import linear_variant
from loka.nn.wrapping import named_sites
from loka.records import GEMMS, Interval
from loka.tuning.row_fits import LEAST, Array, fit_rows
from loka.units import discover
from loka.units.example import call_model
from loka.units.undisturbed import undisturbed

PRIOR = np.log([650.0, 1100.0, 3.8, 2.5, 6.0, 2.5, 1.0])  # TFLOP/s, TFLOP/s, TB/s, us, us, us, 1
HELD = np.array([0.5, 0.2, 0.5, 0.1, 0.1, 0.1, 0.1])  # weight of the prior for each parameter
BACKENDS = ("torch", "triton")  # available in every installation on a GPU


@dataclass(frozen=True)
class Unit:
    """The sizes of a chain.

    Args:
        rows: rows per call.
        links: (K, N) of every linear.
        training: forward and backward; otherwise forward only.
    """

    rows: int
    links: tuple[tuple[int, int], ...]
    training: bool

    @property
    def flops(self) -> float:
        """FLOPs of the forward GEMMs."""
        return sum(2.0 * self.rows * k * n for k, n in self.links)


def _pad(width: int) -> int:
    return -(-width // 16) * 16


def _times(unit: Unit, parameters: Array) -> tuple[float, float]:
    """Return the modelled microseconds in bf16 and in FP8."""
    p16, p8, bandwidth, c16, c8_train, c8_serve, pointwise = map(math.exp, parameters.tolist())
    gemms, c8 = (3, c8_train) if unit.training else (1, c8_serve)
    t16 = t8 = 0.0
    m, last = unit.rows, len(unit.links) - 1
    for index, (k, n) in enumerate((_pad(k), _pad(n)) for k, n in unit.links):
        work, per_byte = 2e-6 * m * k * n, 1e-6 / bandwidth
        moved = m * k + n * k + m * n
        t16 += gemms * (work / p16 + c16 + 2 * moved * per_byte) + pointwise * gemms * 4 * m * n * per_byte
        t8 += gemms * (work / p8 + c8 + moved * per_byte)
        if unit.training:
            t8 += (4 * n * k + 2 * m * n) * per_byte
        if index == 0:
            t8 += pointwise * m * k * (5 if unit.training else 3) * per_byte
        if index == last:
            t8 += pointwise * gemms * 2 * m * n * per_byte
    return t16, t8


def _fit(units: Sequence[Unit], speedups: Array) -> Array:
    """Fit the parameters by Levenberg-Marquardt on the logarithms of the ratios."""
    wanted = np.log(speedups)

    def residuals(p: Array) -> Array:
        ratios = np.array([math.log(a / b) for a, b in (_times(unit, p) for unit in units)])
        return np.concatenate([ratios - wanted, (p - PRIOR) * HELD])

    found, damping = PRIOR.copy(), 1e-2
    now = residuals(found)
    for _ in range(40):
        slopes = np.stack([(residuals(found + 1e-4 * e) - now) / 1e-4 for e in np.eye(len(found))], 1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(found)), -slopes.T @ now)
        then = residuals(found + step)
        if then @ then < now @ now:
            found, damping = found + step, damping / 3
            if now @ now - then @ then < 1e-10:
                break
            now = then
        else:
            damping *= 4
    return found


class Estimator:
    """Estimates speed-ups on one device from measurements made there.

    Args:
        target: device name as torch reports it.
        measured: units and their speed-ups; None uses those that ship with the package.

    Raises:
        ValueError: nothing was measured on that device; the message lists the devices that have measurements.

    Example:
        >>> from loka.tuning.estimating import Unit
        >>> print(Estimator("NVIDIA H200").speedup(Unit(16384, ((512, 1024), (1024, 1024)), training=True)))
    """

    def __init__(self, target: str, measured: Sequence[tuple[Unit, float]] | None = None) -> None:
        known = _shipped_units() if measured is None else {target: list(measured)}
        if target not in known:
            raise ValueError(f"no unit was measured on {target!r}; estimates are for {', '.join(map(repr, known))}")
        self.target = target
        self.units = [unit for unit, _ in known[target]]
        self.measured = np.array([speed for _, speed in known[target]])
        if len(self.units) < LEAST:
            raise ValueError(f"{len(self.units)} units were measured on {target!r}, expected at least {LEAST}")
        self.parameters = _fit(self.units, self.measured)
        self.left_out = self._leave_one_out()

    def _leave_one_out(self) -> Array:
        """Return log(predicted / measured) of every unit, predicted from the others."""
        errors = []
        for index, unit in enumerate(self.units):
            others = [u for i, u in enumerate(self.units) if i != index]
            t16, t8 = _times(unit, _fit(others, np.delete(self.measured, index)))
            errors.append(math.log(t16 / t8) - math.log(self.measured[index]))
        return np.array(errors)

    @property
    def spread(self) -> float:
        """Log error that nine of ten left-out units stay within (the 0.9 quantile)."""
        return float(np.quantile(np.abs(self.left_out), 0.9))

    @property
    def same_side(self) -> int:
        """Number of left-out units that were correctly predicted to be faster or slower than bf16."""
        predicted = self.left_out + np.log(self.measured)
        return int(((predicted > 0) == (self.measured > 1)).sum())

    def speedup(self, unit: Unit) -> Interval:
        """Estimate the speed-up of a chain over compiled bf16.

        Args:
            unit: its sizes.

        Returns:
            The estimate and its interval.
        """
        t16, t8 = _times(unit, self.parameters)
        return _make_interval(t16 / t8, self.spread * (1 if self.covers(unit) else 2))

    def covers(self, unit: Unit) -> bool:
        """Check whether units both smaller and larger than this one were measured."""
        sizes = [known.flops for known in self.units]
        return min(sizes) <= unit.flops <= max(sizes)

    def microseconds(self, unit: Unit) -> tuple[float, float]:
        """Return the modelled microseconds in bf16 and in FP8. Only their ratio was fitted."""
        return _times(unit, self.parameters)

    def linear_speedup(self, rows: int, k: int, n: int, recipe: str, *, training: bool) -> Interval | None:
        """Estimate the speed-up of a linear that runs alone under a recipe.

        Args:
            rows, k, n: its sizes.
            recipe: a name of `loka.dispatch.RECIPES`.
            training: all three GEMMs, with weights quantized once a step; otherwise forward with cached weights.

        Returns:
            The estimate; None if too few rows of the recipe were measured.
        """
        low = high = 0.0
        spread = 0.0
        for gemm in GEMMS if training else GEMMS[:1]:
            own = RECIPES[recipe].operands(gemm)
            # a GEMM that stays in 16-bit counts with its bf16 time from the rowwise measurements
            operands = own or RECIPES["rowwise"].operands(gemm)
            assert operands is not None
            variant = linear_variant(
                gemm,
                str(operands.a),
                str(operands.b),
                fast_accum=operands.fast_accum,
                weights="dynamic" if training else "cached",
            )
            fits = [fit for name in BACKENDS if (fit := fit_rows(self.target, variant, name)) is not None]
            if not fits:
                return None
            best = min(fits, key=lambda fit: fit.microseconds(rows, _pad(k), _pad(n))[1])
            t16, t8 = best.microseconds(rows, _pad(k), _pad(n))
            high, low, spread = high + t16, low + (t16 if own is None else t8), max(spread, best.spread)
        return _make_interval(high / low, spread) if low else None

    def __str__(self) -> str:
        errors = np.abs(self.left_out)
        return (
            f"estimated for {self.target} from {len(self.units)} units measured there; each predicted from the others: half are within {np.expm1(np.median(errors)):.0%}, "
            f"nine of ten within {np.expm1(self.spread):.0%}; {self.same_side} of {len(self.units)} are correctly predicted to be faster or slower than bf16"
        )


def _make_interval(value: float, spread: float) -> Interval:
    value = float(value)
    return Interval(value=value, low=value * math.exp(-spread), high=value * math.exp(spread))


@dataclass(frozen=True)
class ModelEstimate:
    """Estimated speed-up of a model's linears on a device that is not present.

    Args:
        linears: speed-up of all linears together, forward and backward; units that would be slower stay in 16-bit.
        share: share of their GEMM FLOPs in units that are estimated to be faster.
        units: the estimate of each unit, by name.
    """

    linears: Interval
    share: float
    units: dict[str, Interval]


def estimate_model(
    model: nn.Module, example: Any, target: str, *, row_factor: float = 1.0, training: bool = True
) -> ModelEstimate:
    """Estimate whether FP8 would pay off for a model, from its sizes alone, before training or converting anything.

    Args:
        model: a model on any device; it is not changed.
        example: an input of the model.
        target: device name as torch reports it.
        row_factor: rows per call on that device, relative to the example.
        training: forward and backward; otherwise forward only.

    Returns:
        The estimate.

    Example:
        >>> estimate_model(model, batch, "NVIDIA H200", row_factor=16).linears
    """
    found, estimator = discover(model, example, serving=not training, linears=1), Estimator(target)
    rows = {name: scale_rows(count, row_factor) for name, count in _count_rows(model, example).items()}
    units = {
        unit.name: Unit(rows[unit.name], tuple((link.k, link.n) for link in unit.links), training)
        for unit in found.units
    }
    speeds = {name: estimator.speedup(unit) for name, unit in units.items()}
    faster = {name for name, speed in speeds.items() if speed.value > 1}
    chained = {link.linear for unit in found.units for link in unit.links}
    for name, module in named_sites(model):
        if isinstance(module, nn.Linear) and name not in chained and name in rows:
            units[name] = Unit(rows[name], ((module.in_features, module.out_features),), training)
    total = combine_speedups(
        [(estimator.microseconds(unit)[0], speeds[name] if name in faster else None) for name, unit in units.items()]
    )
    flops = sum(unit.flops for unit in units.values()) or 1.0
    return ModelEstimate(total, sum(units[name].flops for name in faster) / flops, speeds)


def combine_speedups(parts: Sequence[tuple[float, Interval | None]]) -> Interval:
    """Return the speed-up of parts that run one after another.

    Args:
        parts: for each, its microseconds in 16-bit, and its speed-up; None if it stays in 16-bit.
    """
    before = sum(time for time, _ in parts)
    after = {
        end: sum(time / (1.0 if speed is None else getattr(speed, end)) for time, speed in parts)
        for end in ("value", "low", "high")
    }
    return Interval(**{end: before / time for end, time in after.items()})


def scale_rows(rows: int, factor: float) -> int:
    """Return the rows of a call on another device, at least one."""
    return max(1, round(rows * factor))


def _count_rows(model: nn.Module, example: Any) -> dict[str, int]:
    """Return the rows per call of every linear."""
    rows: dict[str, int] = {}
    with ExitStack() as stack:
        for name, module in named_sites(model):
            if isinstance(module, nn.Linear):
                hook = lambda m, args, out, name=name: rows.__setitem__(name, out.numel() // m.out_features)  # noqa: E731
                stack.callback(module.register_forward_hook(hook).remove)
        with undisturbed(model), torch.no_grad():
            call_model(model.eval(), example)
    return rows


@cache
def _shipped_units() -> dict[str, list[tuple[Unit, float]]]:
    folder: Any = files("loka.tuning") / "measured"
    found: dict[str, list[tuple[Unit, float]]] = {}
    for file in sorted(folder.iterdir(), key=lambda f: str(f.name)):
        if file.name.endswith(".json"):
            content = json.loads(file.read_text())
            for row in content["units"]:
                unit = Unit(row["rows"], tuple((k, n) for k, n in row["links"]), row["training"])
                found.setdefault(content["device"], []).append((unit, row["speedup"][0]))
    return found
