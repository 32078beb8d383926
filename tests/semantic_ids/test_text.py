"""Text embeddings: similar texts are near, blanks are not silent, scikit-learn stays out of the import."""

import subprocess
import sys

import pytest
import torch

from loka.semantic_ids import ResidualKMeans, embed_text, fit_semantic_ids

TOPICS = ("red nail polish lacquer shine", "steel bolt nut washer thread", "organic green tea leaf bag")


def make_texts(count: int = 90) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    texts = []
    for number in range(count):
        words = TOPICS[number % 3].split()
        keep = torch.randperm(5, generator=generator)[:4].tolist()
        texts.append(" ".join(words[place] for place in keep))
    return texts


def test_topics_separate() -> None:
    vectors = embed_text(make_texts(), dimensions=8)
    assert vectors.shape == (90, 8)
    assert vectors.dtype == torch.float32
    assert torch.allclose(vectors.norm(dim=1), torch.ones(90), atol=1e-5)
    similarity = vectors @ vectors.T
    topic = torch.arange(90) % 3
    same = topic[:, None] == topic
    assert float(similarity[same].min()) > float(similarity[~same].max())


def test_first_code_is_the_topic() -> None:
    index = fit_semantic_ids(embed_text(make_texts(), dimensions=8), ResidualKMeans((3, 8)), collisions="level")
    for topic in range(3):
        assert index.codes[topic::3, 0].unique().numel() == 1
    assert index.codes[:, 0].unique().numel() == 3


def test_same_seed_same_vectors() -> None:
    first, again = (embed_text(make_texts(), dimensions=8, seed=1) for _ in range(2))
    assert torch.equal(first, again)


def test_blank_texts_are_not_silent() -> None:
    texts = [*make_texts(), "", "zzz-unique"]
    with pytest.raises(ValueError, match=r"2 of 92 texts have no known word, e\.g\. number 90"):
        embed_text(texts, dimensions=8)
    vectors = embed_text(texts, dimensions=8, blank="zero")
    assert vectors[90:].abs().max() == 0
    assert torch.allclose(vectors[:90].norm(dim=1), torch.ones(90), atol=1e-5)


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="expected below both"):
        embed_text(make_texts(), dimensions=500)
    with pytest.raises(ValueError, match="lower min_items"):
        embed_text(["alpha beta", "gamma delta"], dimensions=1)
    with pytest.raises(ValueError, match="blank="):
        embed_text(make_texts(), dimensions=8, blank="skip")  # type: ignore[arg-type]


def test_import_is_light() -> None:
    code = (
        "import sys, loka.semantic_ids; sys.exit(any(name in sys.modules for name in ('sklearn', 'scipy', 'polars')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(ValueError, match=r"install: pip install 'loka\[data\]', or pass your own embeddings"):
        embed_text(make_texts(), dimensions=8)
