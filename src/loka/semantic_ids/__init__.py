"""semantic_ids: describe every item by a short tuple of codes, which a generative recommender can generate.

    embeddings = embed_text(titles)                          # from item texts; or your own vectors [n, d]
    embeddings = embed_histories(items, offsets, n_items)    # from co-occurrence in training histories
    index = fit_semantic_ids(embeddings, ResidualKMeans((256, 256, 256)), collisions="level")
    print(index.quality(embeddings))                         # collisions, codebook use, variance left per level
    index.save("items.safetensors");  load_index("items.safetensors")
    nodes = index.trie.step(nodes, codes)                    # constrained decoding; index.trie.items(nodes) at the end

Depends on torch and safetensors only; scikit-learn is needed for `embed_text`.
"""

from loka.semantic_ids.collisions import resolve_collisions
from loka.semantic_ids.histories import embed_histories
from loka.semantic_ids.index import SemanticIndex, load_index
from loka.semantic_ids.residual import ResidualKMeans, fit_semantic_ids
from loka.semantic_ids.text import embed_text
from loka.semantic_ids.trie import Trie

__all__ = [
    "ResidualKMeans", "SemanticIndex", "Trie", "embed_histories", "embed_text", "fit_semantic_ids", "load_index",
    "resolve_collisions",
]  # fmt: skip
