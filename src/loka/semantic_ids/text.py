"""Item embeddings from item text, without a language model: TF-IDF and a truncated SVD (latent semantic analysis).

    A[i, w] = (1 + ln tf) * idf(w), rows of unit length;   A ~ U S V^T with d columns;   x_i = (U S)_i / ||(U S)_i||

Simple on purpose: no download, seconds for ten thousand items, the same vectors for the same seed. A text encoder gives
better neighbors; pass its vectors to `fit_semantic_ids` instead. Uses scikit-learn, which is imported only when called.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def embed_text(
    texts: Sequence[str],
    *,
    dimensions: int = 64,
    max_words: int = 50_000,
    min_items: int = 2,
    blank: Literal["raise", "zero"] = "raise",
    seed: int = 0,
) -> Tensor:
    """Compute item vectors from texts, by TF-IDF and a truncated SVD.

    Args:
        texts: one text per item.
        dimensions: size of the vectors.
        max_words: use at most this many words, the most frequent ones.
        min_items: words, and pairs of words, that occur in fewer texts are ignored.
        blank: what to do with a text without any known word: "raise" an error that names it, or use a "zero" vector
            (all such items then collide).
        seed: seed of the SVD.

    Returns:
        Unit vectors [n, dimensions], float32.

    Example:
        >>> embed_text(["red wine", "white wine", "red apple"], dimensions=2, min_items=1).shape
        torch.Size([3, 2])
    """
    if blank not in ("raise", "zero"):
        raise ValueError(f"blank={blank!r}, expected 'raise' or 'zero'")
    try:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ValueError(
            f"item texts need scikit-learn ({error}); install: pip install 'loka[data]', or pass your own embeddings"
        ) from error
    vectorizer = TfidfVectorizer(
        sublinear_tf=True, ngram_range=(1, 2), min_df=min_items, max_features=max_words, strip_accents="unicode"
    )
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise ValueError(
            f"no word occurs in at least {min_items} of the {len(texts)} texts ({error}); lower min_items"
        ) from error
    if not 1 <= dimensions < min(matrix.shape):
        raise ValueError(
            f"dimensions={dimensions} for {matrix.shape[0]} texts and {matrix.shape[1]} words: expected below both"
        )
    wordless = [row for row, count in enumerate(matrix.getnnz(axis=1)) if count == 0]
    if wordless and blank == "raise":
        raise ValueError(
            f"{len(wordless)} of {len(texts)} texts have no known word, e.g. number {wordless[0]} ({texts[wordless[0]][:40]!r}): "
            "give them text, or pass blank='zero'"
        )
    reduced = torch.from_numpy(TruncatedSVD(dimensions, random_state=seed).fit_transform(matrix)).double()
    lengths = reduced.norm(dim=1, keepdim=True)
    vectors = torch.where(lengths > 0, reduced / lengths.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    vectors[wordless] = 0.0
    return vectors.float()
