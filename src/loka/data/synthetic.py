"""A synthetic click log of any size: generated while it is read, so it needs neither disk nor memory.

**Ids** follow a bounded power law, P(k) ~ k^-alpha for k = 1..n, drawn by inverting the continuous distribution; one in
a hundred is missing (id 0). Vocabularies range from 10 to `cardinality`, evenly in the logarithm.

**Dense features** are x = sinh(1.5 z), z ~ N(0, 1): heavy tails on both sides, monotone in z, so still learnable.

**Labels** come from a hidden teacher: an effect per id, a linear part in tanh(z), and two interactions, user x item and
history x item, as dot products of hidden vectors; label ~ Bernoulli(sigmoid(logit)). A linear model finds the first
part only. The teacher keeps 4,096 hidden values per field and reads entry id mod 4096, so its size does not grow with
the vocabularies.

**Stress mode.** Magnitude alone is harmless to a scaled format: the scale absorbs it. What hurts is range *inside* a
scaling group. So with `stress`, on the dense features:

    x[i, c] = sinh(1.5 z[i, c]) * exp(sigma * g_i) * outlier_c + bias_c * expm1(growth * position_i / rows)

g_i ~ N(0, 1) per row with sigma >= 4 (rows that share a tile or a tensor differ by e^10), a few outlier channels (one
row differs by 1,000 inside itself), and biases that diverge as the log goes on.

Chunk k of split s is generated from the seed (seed, s, k) alone: any range can be produced on its own, in any order,
exactly.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.progress import Progress
from loka.data.ranking import RankingData, Split
from loka.data.rows import Array, Rows, Windows
from loka.data.schema import Field, Schema, SequenceField

_CHUNK = 4096
_TABLE = 4096
_RANK = 8
_MISSING = 0.01
_TEACHER_STREAM = 3
_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Options:
    """Size and shape of the generated log."""

    rows: int = 1_000_000  # training examples; validation and test have a tenth of this, at least 1,000 each
    dense: int = 13
    categorical: int = 26
    cardinality: int = 100_000  # of the largest fields, user and item
    alpha: float = 1.2
    max_history: int = 20  # longest history; 0: no history
    seed: int = 0
    stress: bool = False
    sigma: float = 4.0  # stress: standard deviation of the logarithm of the row scales
    outlier_channels: int = 2
    outlier_scale: float = 1000.0
    bias_growth: float = 5.0
    cached: bool = False  # write the log to the cache instead of generating it on every pass

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dense < 0 or self.max_history < 0 or self.seed < 0:
            raise ValueError(f"rows >= 1, dense >= 0, max_history >= 0 and seed >= 0 are needed, got {self}")
        if self.categorical < 2 or self.cardinality < 10:
            raise ValueError(
                f"at least 2 categorical fields (user, item) and a cardinality of 10 are needed, got {self.categorical} "
                f"and {self.cardinality}"
            )
        if self.alpha <= 0 or self.alpha == 1.0:
            raise ValueError(
                f"alpha must be positive and not exactly 1 (the inverse is singular there), got {self.alpha}"
            )
        if self.stress and (self.sigma < 4.0 or not 0 <= self.outlier_channels <= self.dense):
            raise ValueError(
                f"stress needs sigma >= 4 and at most {self.dense} outlier channels, got sigma={self.sigma} and "
                f"outlier_channels={self.outlier_channels}: weaker settings would not stress a scaled format"
            )


def make_schema(options: Options) -> Schema:
    """Return the columns: user, item, then fields of falling cardinality."""
    sizes = np.geomspace(options.cardinality, 10, max(options.categorical - 1, 1)).round().astype(int)
    names = ["user", "item", *(f"field_{index}" for index in range(2, options.categorical))]
    fields = tuple(Field(n, int(s) + 1) for n, s in zip(names, [options.cardinality, *sizes], strict=True))
    history = (
        SequenceField("history", fields[1].cardinality, options.max_history, "item") if options.max_history else None
    )
    dense = tuple(f"dense_{index}" for index in range(options.dense))
    return Schema(dense, fields, (history,) if history else (), ("click",))


class SyntheticSource:
    """One split of the generated log."""

    def __init__(self, options: Options, split: str) -> None:
        self._options = options
        self._split = _SPLITS.index(split)
        self._schema = make_schema(options)
        self._rows = options.rows if split == "train" else max(1000, options.rows // 10)
        held_out = max(1000, options.rows // 10)
        self._first = (0, options.rows, options.rows + held_out)[self._split]
        self._sizes = np.array([f.cardinality - 1 for f in self._schema.categorical], np.float64)
        self._teacher = _Teacher(options)

    def __len__(self) -> int:
        return self._rows

    def fingerprint(self) -> str:
        """A string of the options, which define the data."""
        return f"synthetic/{_SPLITS[self._split]}/{sorted(asdict(self._options).items())}"

    def read(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        """Generate the chunks that cover the ranges, and cut the ranges out."""
        parts = []
        for start, stop in ranges:
            for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
                rows = self._generate(chunk)
                low, high = max(start - chunk * _CHUNK, 0), min(stop - chunk * _CHUNK, _CHUNK)
                parts.append(rows if high - low == len(rows) else rows.take(slice(low, high)))
        return _concatenate(parts) if parts else self._generate(0).take(slice(0, 0))

    def _generate(self, chunk: int) -> Rows:
        options = self._options
        rng = np.random.default_rng([options.seed, self._split, chunk])
        ids = _power_law(rng.random((_CHUNK, options.categorical)), self._sizes, options.alpha)
        ids[rng.random(ids.shape) < _MISSING] = 0
        z = rng.standard_normal((_CHUNK, options.dense), dtype=np.float32)
        lengths = np.minimum(rng.geometric(2 / (options.max_history + 2), _CHUNK) - 1, options.max_history)
        ends = np.cumsum(lengths)
        history = _power_law(rng.random((int(ends[-1]), 1)), self._sizes[1:2], options.alpha)[:, 0]
        windows = Windows(history, ends - lengths, lengths)
        logit = self._teacher.logit(ids, z, windows)
        label = (rng.random(_CHUNK) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        dense = np.sinh(1.5 * z)
        if options.stress:
            dense = self._stress(dense, rng, self._first + chunk * _CHUNK)
        sequences = {"history": windows} if options.max_history else {}
        return Rows(dense, ids, label[:, None], ids[:, 0].astype(np.int64), sequences)

    def _stress(self, dense: Array, rng: np.random.Generator, position: int) -> Array:
        options = self._options
        fixed = np.random.default_rng([options.seed, _TEACHER_STREAM, 1])
        channel = np.ones(options.dense, np.float32)
        channel[fixed.choice(options.dense, options.outlier_channels, replace=False)] = options.outlier_scale
        bias = fixed.standard_normal(options.dense)
        time = (position + np.arange(len(dense))) / options.rows
        scale = np.exp(options.sigma * rng.standard_normal((len(dense), 1), dtype=np.float32))
        drift = np.expm1(options.bias_growth * time)[:, None] * bias
        stressed: Array = dense * scale * channel + drift
        return stressed.astype(np.float32)


class _Teacher:
    """The hidden model that decides the labels."""

    def __init__(self, options: Options) -> None:
        rng = np.random.default_rng([options.seed, _TEACHER_STREAM, 0])
        fields = options.categorical
        self._effects = rng.standard_normal((fields, _TABLE)).astype(np.float32) * np.float32(0.8 / np.sqrt(fields))
        self._dense = rng.standard_normal(options.dense).astype(np.float32) * np.float32(
            0.8 / np.sqrt(max(options.dense, 1))
        )
        self._user = rng.standard_normal((_TABLE, _RANK)).astype(np.float32) / np.float32(_RANK**0.5)
        self._item = rng.standard_normal((_TABLE, _RANK)).astype(np.float32)

    def logit(self, ids: Array, z: Array, history: Windows) -> Array:
        code = ids % _TABLE
        out: Array = -1.0 + np.tanh(z) @ self._dense
        for index in range(ids.shape[1]):
            out += self._effects[index, code[:, index]]
        item = self._item[code[:, 1]]
        out += (self._user[code[:, 0]] * item).sum(1)
        # Mean of the history's item vectors, from differences of a running sum, so empty histories are no special case.
        running = np.zeros((len(history.values) + 1, _RANK), np.float32)
        np.cumsum(self._item[history.values % _TABLE], axis=0, out=running[1:])
        total = running[history.start + history.length] - running[history.start]
        mean = total / np.sqrt(np.maximum(history.length, 1))[:, None]
        out += 0.5 * (mean * item).sum(1) / _RANK**0.5
        return out


def open_synthetic(options: Options) -> RankingData:
    """Make the data set; nothing is generated until it is read."""
    schema = make_schema(options)
    train, valid, test = (Split(name, schema, SyntheticSource(options, name)) for name in _SPLITS)
    return RankingData("synthetic", schema, train, valid, test, {"options": asdict(options)})


def build(files: dict[str, Any], options: Options, writer: CacheWriter, progress: Progress) -> None:
    """Write the generated log into a cache, one window at a time."""
    schema = make_schema(options)
    writer.schema = schema
    written = 0
    for name in _SPLITS:
        source = SyntheticSource(options, name)
        for start in range(0, len(source), 16 * _CHUNK):
            rows = source.read([(start, min(start + 16 * _CHUNK, len(source)))])
            written += _append(writer, name, schema, rows, written)
            writer.bad.seen(len(rows))
            progress(f"generating {name}", start + len(rows), len(source))


def _power_law(uniform: Array, sizes: Array, alpha: float) -> Array:
    """Turn uniform numbers into ids 1..size with P(k) ~ k^-alpha."""
    power = 1.0 - alpha
    top = (sizes + 1.0) ** power - 1.0
    ids = (1.0 + uniform * top) ** (1.0 / power)
    return np.minimum(ids, sizes).astype(np.int32)


def _concatenate(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    sequences = {}
    for name in parts[0].sequences:
        windows = [part.sequences[name] for part in parts]
        bases = np.concatenate([[0], np.cumsum([len(w.values) for w in windows])])
        sequences[name] = Windows(
            np.concatenate([w.values for w in windows]),
            np.concatenate([w.start + base for w, base in zip(windows, bases[:-1], strict=True)]),
            np.concatenate([w.length for w in windows]),
        )
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("dense", "categorical", "labels", "group")
    }
    return Rows(**columns, sequences=sequences)


def _append(writer: CacheWriter, split: str, schema: Schema, rows: Rows, written: int) -> int:
    """Append rows to a cache, and return how many sequence values were written."""
    sequences, taken = {}, 0
    for name, windows in rows.sequences.items():
        values, offsets = windows.gather()
        writer.append(f"values/{name}", values, np.int32)
        sequences[name] = (offsets[:-1] + written, np.diff(offsets))
        taken = len(values)
    writer.append_rows(
        split,
        dense={name: rows.dense[:, index] for index, name in enumerate(schema.dense)},
        categorical={field.name: rows.categorical[:, index] for index, field in enumerate(schema.categorical)},
        labels={name: rows.labels[:, index] for index, name in enumerate(schema.labels)},
        group=rows.group,
        sequences=sequences,
    )
    return taken
