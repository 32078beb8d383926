"""`loka generate`: recommend items to users of a data set, with readable titles.

    loka generate --train 100 --out runs/onerec                train a small OneRec on the embedded data set, and use it
    loka generate --from runs/onerec --users 3 --top 5         use it again
    loka generate --from runs/onerec --items 12,40,7 --json    for a history of your own
    loka generate --from runs/onerec-fp8 ...                   a model from loka quantize or loka train --model onerec

Prints for each user the end of the history and the recommended items with their log-probability. `*` marks items that
the user took next, according to the test split, which the model never saw. Exit 2 if the request is invalid.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import claim_folder

if TYPE_CHECKING:
    from loka.data.sequences import SequenceData
    from loka.inference import Bundle


def generate(
    from_: Annotated[Path | None, typer.Option("--from", help="Folder of an existing model.")] = None,
    train: Annotated[int | None, typer.Option(help="Train a new model first, for this many steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the model trained by --train.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set; default: the model's, or complete-journey.")] = None,
    users: Annotated[int, typer.Option(help="Number of test users, from the first.")] = 3,
    items: Annotated[
        str | None, typer.Option(help="A history instead of test users: item numbers, comma-separated, oldest first.")
    ] = None,
    top: Annotated[int, typer.Option(help="Items per user.")] = 10,
    beams: Annotated[int, typer.Option(help="Width of the beam search.")] = 50,
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="Leave out items of the history.")] = False,
    precision: Annotated[str, typer.Option(help="Precision of unquantized layers: bf16, fp16 or fp32.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recommend items to users of a data set."""
    if (from_ is None) == (train is None):
        raise ValueError("give either an existing model (--from FOLDER) or train one (--train STEPS --out FOLDER)")
    folder = from_ or out
    if folder is None:
        raise ValueError("--train needs --out, the folder to write the model to")
    from loka.inference import is_bundle

    if from_ is not None and out is not None:
        raise ValueError(f"--out {out} is for the model that --train makes; --from {from_} writes nothing")
    claim_folder("--out", out)
    if out is not None and is_bundle(out):
        raise ValueError(f"--out {out}: holds a model already; hint: --from {out} uses it, or give a new folder")
    if top > beams:
        raise ValueError(f"--top {top} needs at least as many --beams, got {beams}")
    from loka.cli.subject import find_device
    from loka.cli.train_sequence import train_small
    from loka.inference import load_bundle

    find_device(device)
    if train is not None:
        train_small(data or "complete-journey", folder, steps=train, seed=seed, root=data_root, source=source)
    bundle = load_bundle(folder)
    opened = bundle.open_data(data, root=data_root, source=source)
    found = recommend(bundle, opened, users, items, top, beams, exclude_seen, precision, device)
    if json_:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for one in found:
        typer.echo(describe(one))
    marked = "; * marks what the user took next" if items is None else ""
    typer.echo(f"score: log-likelihood of the item{marked}", err=True)


def recommend(
    bundle: Bundle,
    data: SequenceData,
    users: int,
    items: str | None,
    top: int,
    beams: int,
    exclude_seen: bool,
    precision: str,
    device: str,
) -> list[dict[str, Any]]:
    """Return the histories, recommendations and hits, ready to print."""
    import numpy as np
    import torch

    from loka.inference import Engine, EngineConfig, Recommender

    histories, targets, names = [], [], []
    if items is not None:
        try:
            histories = [torch.tensor([int(word) for word in items.split(",") if word.strip()], dtype=torch.int64)]
        except ValueError as error:
            raise ValueError(f"--items {items!r}: expected item numbers with commas between them") from error
        targets, names = [torch.empty(0, dtype=torch.int64)], [-1]
    else:
        if not 1 <= users <= len(data.test):
            raise ValueError(f"--users {users}: expected 1 to {len(data.test)}, the test users of {data.name}")
        cut = data.test.cut(np.arange(users), bundle.model.config.context)
        edges, goals = cut.history.offsets.tolist(), cut.targets.offsets.tolist()
        histories = [cut.history.values[a:b] for a, b in pairwise(edges)]
        targets = [cut.targets.values[a:b] for a, b in pairwise(goals)]
        names = cut.users.tolist()
    config = EngineConfig(beams=beams, requests=(1, 4, 16), dtype=precision, normalize=bundle.info.normalize)
    engine = Engine(bundle.model.to(device), config, valid=bundle.index.trie)
    found = Recommender(engine, bundle.index).recommend(histories, top=top, exclude_seen=exclude_seen)
    out = []
    for name, history, goal, one in zip(names, histories, targets, found, strict=True):
        assert one.items is not None  # a recommender is constrained to items
        rows = [
            {"item": item, "title": title_of(data, item), "score": score, "taken": item in goal.tolist()}
            for item, score in zip(one.items.tolist(), one.scores.tolist(), strict=True)
        ]
        last = [{"item": i, "title": title_of(data, i)} for i in history[-3:].tolist()]
        out.append({"user": name, "history": len(history), "last": last, "unknown": one.dropped, "recommended": rows})
    return out


def title_of(data: SequenceData, item: int) -> str:
    """Return the title of an item, else the publisher's key, else its number."""
    if data.titles is not None and 0 < item < len(data.titles) and data.titles[item]:
        return data.titles[item]
    return data.item_keys[item] if 0 < item < len(data.item_keys) else f"item {item}"


def describe(one: dict[str, Any]) -> str:
    """Format the recommendations of one user as text."""
    who = "your history" if one["user"] < 0 else f"user {one['user']}"
    unknown = f", {one['unknown']} unknown" if one["unknown"] else ""
    lines = [
        f"{who}: {one['history']} item{'s' * (one['history'] != 1)}{unknown}, last {'; '.join(x['title'] for x in one['last']) or '(none)'}"
    ]
    for place, row in enumerate(one["recommended"], 1):
        lines.append(f"  {place:3}. {row['score']:8.3f}  {'*' if row['taken'] else ' '} {row['title']}")
    return "\n".join(lines)
