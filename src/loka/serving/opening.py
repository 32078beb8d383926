"""From a folder to a model: what `loka serve`, a reload and a Ray replica all do."""

from pathlib import Path

from loka.serving.servable import Servable


def open_model(
    folder: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    beams: int = 50,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16),
    contexts: tuple[int, ...] | None = None,
    rows: tuple[int, ...] = (64, 256, 1024, 4096),
    factory: str | None = None,
    batch_invariant: bool = False,
) -> Servable:
    """A recommender or a ranker, by what the folder holds.

    Args:
        folder: of `loka generate --train` or `save_ranker`.
        name: as clients know it; default: the folder's.
        precision, beams, batches, contexts: of a recommender's engine.
        rows, factory: of a ranker.
        batch_invariant: one bucket, so that answers do not depend on who else is in the batch.

    Example:
        >>> open_model("runs/onerec", beams=50).buckets                                 # doctest: +SKIP
    """
    from loka.inference import EngineConfig, is_bundle, load_bundle
    from loka.inference.bundle import MODEL
    from loka.serving.generative import GenerativeModel, digest
    from loka.serving.rank_bundle import is_ranker_bundle
    from loka.serving.ranker import open_ranker

    place = Path(folder)
    called = name or place.resolve().name
    if is_bundle(place):
        if factory is not None:
            raise ValueError(f"--factory {factory}: {place} is a generative recommender, which needs none")
        bundle = load_bundle(place)
        config = EngineConfig(
            beams=beams,
            requests=tuple(batches),
            contexts=None if contexts is None else tuple(contexts),
            dtype=precision,
            normalize=bundle.info.normalize,
            batch_invariant=batch_invariant,
        )
        return GenerativeModel(bundle, config, device=device, name=called, version=digest(place / MODEL))
    if is_ranker_bundle(place):
        return open_ranker(
            place, factory=factory, name=called, rows=tuple(rows), device=device, batch_invariant=batch_invariant
        )
    raise ValueError(
        f"{place} holds neither bundle.json nor ranker.json; hint: loka generate --train 100 --out {place}, or loka.serving.save_ranker"
    )
