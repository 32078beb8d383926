"""Tiny raw data sets in the publishers' formats, made up, for tests."""

import gzip
import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from loka.data.census import COLUMNS

GENRES = ("Action", "Comedy", "Drama", "Horror")
START = 956_703_932


def write_movielens(folder: Path, *, ratings: int = 3000, users: int = 40, movies: int = 60, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    # A coarse clock, so that many ratings of a user share a second.
    times = START + np.sort(rng.integers(0, ratings // 8, ratings)) * 3600
    lines = [
        f"{rng.integers(1, users + 1)}::{rng.integers(1, movies + 1)}::{rng.integers(1, 6)}::{time}"
        for time in rng.permutation(times)
    ]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    people = [f"{u}::{'MF'[u % 2]}::{(1, 18, 25)[u % 3]}::{u % 21}::{10000 + u * 371}" for u in range(1, users + 1)]
    (folder / "users.dat").write_text("\n".join(people) + "\n")
    titles = [f"{m}::Film {m} (19{50 + m % 50})::{'|'.join(GENRES[: 1 + m % 4])}" for m in range(1, movies + 1)]
    titles[0] = "1::Misérables, Les (1995)::Drama"
    (folder / "movies.dat").write_bytes(("\n".join(titles) + "\n").encode("latin-1"))
    return folder


def census_line(rng: np.random.Generator) -> str:
    values = dict.fromkeys(COLUMNS, "Not in universe")
    numbers = (
        "age",
        "wage_per_hour",
        "capital_gains",
        "capital_losses",
        "dividends",
        "persons_at_employer",
        "weeks_worked",
    )
    values |= {name: str(rng.integers(0, 90)) for name in numbers}
    values["instance_weight"] = f"{rng.random() * 2000:.2f}"
    values["education"] = ["Children", "High school graduate", "Bachelors degree(BA AB BS)"][rng.integers(3)]
    values["marital_status"] = ["Never married", "Divorced", "Widowed"][rng.integers(3)]
    values["migration_msa"] = ["?", "Nonmover"][rng.integers(2)]
    rich = rng.random() < (0.1 if values["education"] == "Children" else 0.4)
    values["income_class"] = "50000+." if rich else "- 50000."
    return ", ".join(values[name] for name in COLUMNS)


def write_census(folder: Path, *, train: int = 600, test: int = 200, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("census-income.data.gz", train), ("census-income.test.gz", test)):
        text = "".join(census_line(rng) + "\n" for _ in range(rows))
        (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder


def criteo_line(rng: np.random.Generator) -> str:
    integers = ["" if rng.random() < 0.2 else str(rng.integers(-1, 1000)) for _ in range(13)]
    categories = ["" if rng.random() < 0.1 else f"{rng.integers(0, 30) * 2654435761 % 2**32:08x}" for _ in range(26)]
    return "\t".join([str(rng.integers(0, 2)), *integers, *categories])


def write_criteo(folder: Path, *, rows: dict[str, int] | None = None, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (rows or {"train": 500, "dev": 60, "test": 70}).items():
        (folder / f"sample_{name}.tsv").write_text("".join(criteo_line(rng) + "\n" for _ in range(count)))
    return folder


def write_amazon(folder: Path, *, users: int = 30, items: int = 20, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {str(u): rng.integers(0, items, rng.integers(5, 9)).tolist() for u in range(users)}
    rows["0"][0] = items - 1
    (folder / "Toys.inter.json").write_text(json.dumps(rows))
    texts = {str(i): {"title": f"Toy {i}", "brand": "B", "categories": "Toys", "description": ""} for i in range(items)}
    (folder / "Toys.item.json").write_text(json.dumps(texts))
    codes = {str(i): [f"<a_{i % 4}>", f"<b_{i // 4}>"] for i in range(items)}
    (folder / "Toys.index.rqvae.json").write_text(json.dumps(codes))
    return folder


def write_journey(folder: Path, *, households: int = 15, products: int = 40, baskets: int = 900, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    start = datetime(2017, 1, 1, 9)
    seconds = np.sort(rng.integers(0, 364 * 86_400, baskets))
    rows = []
    for basket, offset in enumerate(seconds):
        household = int(rng.integers(1, households + 1))
        moment = start + timedelta(seconds=int(offset))
        chosen = rng.choice(products, rng.integers(1, 6), replace=False)
        rows += [(household, int(rng.integers(1, 4)), basket, int(product) * 7, moment) for product in chosen]
    names = ["household_id", "store_id", "basket_id", "product_id", "transaction_timestamp"]
    pl.DataFrame(rows, schema=names, orient="row").write_parquet(folder / "transactions.parquet")
    described = range(products - 2)  # two products are sold but not described
    pl.DataFrame(
        {
            "product_id": [p * 7 for p in described],
            "manufacturer_id": [p % 5 for p in described],
            "department": ["GROCERY" if p % 2 else "PASTRY" for p in described],
            "brand": ["National" if p % 3 else "Private" for p in described],
            "product_category": [f"CATEGORY {p % 6}" for p in described],
            "product_type": [f"TYPE {p % 9}" for p in described],
            "package_size": [None if p % 4 == 0 else f"{p} OZ" for p in described],
        }
    ).write_parquet(folder / "products.parquet")
    known = list(range(1, households, 2))
    pl.DataFrame(
        {
            "household_id": known,
            "age": ["25-34" if h % 3 else "65+" for h in known],
            "income": ["35-49K"] * len(known),
            "home_ownership": [None if h % 5 == 0 else "Homeowner" for h in known],
            "marital_status": ["Married"] * len(known),
            "household_size": ["2"] * len(known),
            "household_comp": ["2 Adults No Kids"] * len(known),
            "kids_count": ["0"] * len(known),
        }
    ).write_parquet(folder / "demographics.parquet")
    return folder
