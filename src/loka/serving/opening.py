"""Open a model from its folder, for `loka serve`, reloads and Ray replicas."""

from collections.abc import Sequence
from pathlib import Path

from loka.serving.servable import Servable


def open_model(
    folder: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    precision: str | None = None,
    beams: int | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    context_cache: str | None = None,
    rows: Sequence[int] | None = None,
    factory: str | None = None,
    batch_invariant: bool = False,
    compiled: bool | None = None,
) -> Servable:
    """Open a recommender or a ranker, depending on what the folder holds.

    Args:
        folder: folder of `loka generate --train`, `loka train --model onerec` or `save_ranker`.
        name: the name clients use; default: the folder's.
        device: device to run on.
        precision, beams, batches, contexts, context_cache: options of a recommender's engine; default: fp32, 50,
            (1, 2, 4, 8, 16), the model's longest context, "plain". An error for a ranker.
        rows, factory, compiled: options of a ranker; default: (64, 256, 1024, 4096), none, False. An error for a
            recommender.
        batch_invariant: run every batch in the largest bucket, so that answers do not depend on the rest of the batch.

    Returns:
        A `GenerativeModel` or a `RankingModel`.

    Example:
        >>> open_model("runs/onerec", beams=50).buckets                                 # doctest: +SKIP
    """
    from loka.inference import EngineConfig, is_bundle, load_bundle
    from loka.inference.bundle import INDEX, MODEL
    from loka.serving.generative import GenerativeModel, digest
    from loka.serving.rank_bundle import MODEL as WEIGHTS
    from loka.serving.rank_bundle import PLAN, is_ranker_bundle, load_ranker
    from loka.serving.ranker import ROWS, RankingModel

    place = Path(folder)
    called = name or place.resolve().name
    if is_bundle(place):
        _refuse(place, "a generative recommender", rows=rows, factory=factory, compiled=compiled or None)
        bundle = load_bundle(place)
        config = EngineConfig(
            beams=50 if beams is None else beams,
            requests=(1, 2, 4, 8, 16) if batches is None else tuple(batches),
            contexts=None if contexts is None else tuple(contexts),
            dtype=precision or "fp32",
            normalize=bundle.info.normalize,
            batch_invariant=batch_invariant,
            context_cache=context_cache or "plain",
        )
        return GenerativeModel(bundle, config, device=device, name=called, version=digest(place / MODEL, place / INDEX))
    if is_ranker_bundle(place):
        _refuse(place, "a ranker", precision=precision, beams=beams, batches=batches, contexts=contexts, context_cache=context_cache)  # fmt: skip
        ranker = load_ranker(place, factory=factory, device=device)
        version = digest(*(place / name for name in (WEIGHTS, PLAN) if (place / name).exists()))
        sizes = ROWS if rows is None else tuple(rows)
        return RankingModel(
            ranker,
            name=called,
            version=version,
            rows=sizes,
            device=device,
            batch_invariant=batch_invariant,
            compiled=bool(compiled),
        )
    raise ValueError(
        f"{place} holds neither bundle.json nor ranker.json; hint: loka generate --train 100 --out {place}, "
        "loka tune MODEL --serve --out FOLDER (its ranker/), or loka.serving.save_ranker"
    )


def _refuse(place: Path, kind: str, **options: object) -> None:
    """Raise ValueError for options of the other kind of model, instead of ignoring them silently."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{place} is {kind}: it has no {', '.join(given)}")
