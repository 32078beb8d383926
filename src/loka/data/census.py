"""Census-Income (KDD): 199,523 + 99,762 people of two US surveys, 1994-95 (UCI; attribution). The multi-task benchmark.

**Tasks.** Two labels from one record: `income` (more than 50,000 dollars) and `never_married`. The marital status is
the second label and therefore no feature; instance_weight, a survey weight and not a property of the person, is
dropped.

**Split.** The publisher's own train and test files. The records carry no time, so validation is every tenth training
record of a seeded permutation. There is no user either: `group` is 0 throughout, and GAUC equals AUC.

**Features.** Seven amounts and counts, as log(1 + x), and 32 categorical fields; "?" is missing, id 0. Codes that look
like numbers (industry, occupation, year) are categories.

**Baseline** (benchmarks/logistic_baseline.py, test split): one-hot logistic regression reaches AUC 0.945 for income and
0.994 for never_married.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.faults import BadRows, DataError
from loka.data.progress import Progress
from loka.data.schema import Field, Schema
from loka.data.tables import explain_bad, open_unpacked, split_lines
from loka.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import polars as pl

COLUMNS = (
    "age", "class_of_worker", "industry_code", "occupation_code", "education", "wage_per_hour",
    "enrolled_in_education", "marital_status", "major_industry", "major_occupation", "race", "hispanic_origin", "sex",
    "union_member", "unemployment_reason", "employment_status", "capital_gains", "capital_losses", "dividends",
    "tax_filer", "previous_region", "previous_state", "household_status", "household_summary", "instance_weight",
    "migration_msa", "migration_region", "migration_within_region", "same_house_a_year_ago", "previous_sunbelt",
    "persons_at_employer", "family_under_18", "father_birth_country", "mother_birth_country", "birth_country",
    "citizenship", "own_business", "veterans_questionnaire", "veterans_benefits", "weeks_worked", "year",
    "income_class",
)  # fmt: skip
_DENSE = ("age", "wage_per_hour", "capital_gains", "capital_losses", "dividends", "persons_at_employer", "weeks_worked")
_NOT_FEATURES = ("marital_status", "instance_weight", "income_class")
_CATEGORICAL = tuple(name for name in COLUMNS if name not in (*_DENSE, *_NOT_FEATURES))
_INCOME = {"- 50000.": 0.0, "50000+.": 1.0}
_LABELS = ("income", "never_married")


@dataclass(frozen=True)
class Options:
    """Options of the cache; each choice has its own cache."""

    valid_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.valid_share < 1:
            raise ValueError(f"valid_share must lie in (0, 1), got {self.valid_share}")


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate the train and test file, packed or not."""
    if source is None or not source.is_dir():
        raise DataError(f"census-income-kdd: needs a folder, got {source}")
    files = {}
    for split, stem in (("train", "census-income.data"), ("test", "census-income.test")):
        found = [source / name for name in (f"{stem}.gz", stem) if (source / name).is_file()]
        if not found:
            raise DataError(f"census-income-kdd: {source} holds neither {stem}.gz nor {stem}")
        files[split] = found[0]
    return files


def build(files: dict[str, Path], options: Options, writer: CacheWriter, progress: Progress) -> None:
    """Preprocess both files."""
    import polars as pl

    parts: dict[str, pl.DataFrame] = {}
    for step, (split, path) in enumerate(files.items()):
        progress(f"reading {path.name}", step, 3)
        parts[split] = _read_people(path, writer.bad)
    order = np.random.default_rng(options.seed).permutation(parts["train"].height)
    held_out = np.zeros(len(order), bool)
    held_out[order[: max(1, round(len(order) * options.valid_share))]] = True
    mask = pl.Series(held_out)
    splits = {"train": parts["train"].filter(~mask), "valid": parts["train"].filter(mask), "test": parts["test"]}
    progress("encoding", 2, 3)
    vocabularies = {name: Vocabulary.fit(splits["train"][name]) for name in _CATEGORICAL}
    fields = tuple(Field(name, vocabulary.cardinality) for name, vocabulary in vocabularies.items())
    writer.schema = Schema(_DENSE, fields, (), _LABELS)
    for split, frame in splits.items():
        writer.append_rows(
            split,
            dense={name: np.log1p(frame[name].to_numpy()) for name in _DENSE},
            categorical={name: vocabulary.encode(frame[name]) for name, vocabulary in vocabularies.items()},
            labels={name: frame[name].to_numpy() for name in _LABELS},
            group=np.zeros(frame.height, np.int64),
        )
    for name, vocabulary in vocabularies.items():
        writer.add_asset(f"vocabulary.{name}.json", vocabulary.to_json())
    progress("done", 3, 3)


def _read_people(path: Path, bad: BadRows) -> pl.DataFrame:
    """Parse one file into typed columns; '?' becomes null."""
    import polars as pl

    with open_unpacked(path) as file:
        content = file.read()
    raw = split_lines(content, ",", COLUMNS)
    number = [pl.col(name).cast(pl.Float64, strict=False) for name in _DENSE]
    parsed = raw.select(
        *(pl.when(value >= 0).then(value).alias(name) for name, value in zip(_DENSE, number, strict=True)),
        pl.col("income_class").replace_strict(_INCOME, default=None, return_dtype=pl.Float64).alias("income"),
        pl.when(pl.col("marital_status") != "")
        .then((pl.col("marital_status") == "Never married").cast(pl.Float64))
        .alias("never_married"),
    )
    good = explain_bad(raw, parsed, path.name, bad, len(COLUMNS), ended=content.endswith(b"\n"))
    bad.check(f"census-income-kdd {path.name}")
    missing = [pl.when(pl.col(name) != "?").then(pl.col(name)).alias(name) for name in _CATEGORICAL]
    return pl.concat([parsed, raw.select(missing)], how="horizontal").filter(good)
