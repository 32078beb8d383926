"""Alarms for columns of a raw input whose mean is large compared with their spread: a year, a price, a timestamp.

A format with m mantissa bits rounds a value to within 2^-(m+1) of its size. E4M3 has three: a year is off by up to 64.
A model learns from the variation of a column, so a column is at risk if

    |mean| / spread > RATIO                     8: the rounding of E4M3 (2.6 % rms) is a fifth of the spread
    |mean| * 2^-5   > 0.1 * median spread       the error is large enough to matter compared with the other columns

No scale helps, because the rounding error is relative to the element. The alarm names a cause; it is not a verdict,
which is left to the score. The same holds for bf16 with 2^-9. For a timestamp even that is too coarse, and the alarm
recommends float32.

Only inputs that need no gradient are checked, because those come from the data. `loka.probe.cause` handles large means
inside a model.
"""

import torch
from torch import Tensor

from loka.records import Alarm

RATIO = 8.0
FP8_ROUNDING, BF16_ROUNDING = 2.0**-5, 2.0**-9  # approximate rms rounding error, relative to the value
MATTERS = 0.1
MAX_ALARMS = 5
SKEWED = 16.0


@torch.no_grad()
def find_offsets(rows: Tensor) -> list[Alarm]:
    """Find columns at risk in rows [R, K] sampled from several batches: at most five alarms, the worst first."""
    rows = rows[rows.isfinite().all(1)].double()
    if rows.shape[0] < 8:
        return []
    mean, spread = rows.mean(0), rows.std(0)
    usual = spread.median()
    ratio = mean.abs() / spread
    large = mean.abs() * FP8_ROUNDING > MATTERS * usual
    danger = (spread > 0) & (ratio > RATIO) & large
    columns = danger.nonzero().flatten().tolist()
    columns.sort(key=lambda column: -float(ratio[column]))
    return [_describe(column, rows[:, column]) for column in columns[:MAX_ALARMS]]


def _describe(column: int, values: Tensor) -> Alarm:
    mean, spread = float(values.mean()), float(values.std())
    size = abs(mean)
    text = (
        f"column {column} of the input has mean {mean:.6g} and spread {spread:.3g}: FP8 moves its values by about "
        f"{size * FP8_ROUNDING:.3g}"
    )
    helps = ["center or standardize it before the linear"]
    if float(values.min()) > 0 and float(values.max() / values.median()) > SKEWED:
        helps.append("take its logarithm")
    helps.append("cut it into bins")
    if size * BF16_ROUNDING > MATTERS * spread:
        text += f", bf16 by about {size * BF16_ROUNDING:.3g}"
        helps.append("or keep this site in float32: bf16 is too coarse as well")
    else:
        helps.append("or keep this site in high precision")
    helps.append("finer scales do not help, since rounding is relative to the value")
    return Alarm(column=column, mean=mean, spread=spread, text=text, help="; ".join(helps))
