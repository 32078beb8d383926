"""The semantic index: the mapping between items and tuples of codes. Immutable, saved as one safetensors file.

    codes  [n_items, levels]   code of item `items[row]` at each level, coarse to fine
    items  [n_items]           item numbers: any distinct non-negative integers (from 1 if 0 is padding)

The file holds the tensors and, in the safetensors header, one JSON object (key "loka") with the schema version and the
codebook sizes. Centroids are optional: an index from another source has none, and neither has a level that was added to
resolve collisions.

Two items may share their codes (a collision). Lookups from codes to items, and the trie, are then ambiguous and raise:
call `loka.semantic_ids.resolve_collisions` first.
"""

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loka.records import replacing
from loka.semantic_ids.quality import Quality, measure_quality
from loka.semantic_ids.trie import Trie, build_trie

SCHEMA = 1
_HEADER = "loka"


@dataclass(frozen=True, eq=False)
class SemanticIndex:
    """Items and their codes.

    Args:
        codes: int64 [n, levels].
        codebook_sizes: one per level.
        items: int64 [n], the item of every row.
        centroids: [codebook size, d] per level, for the leading levels that have centroids.

    Example:
        >>> index.save("index.safetensors")
    """

    codes: Tensor
    codebook_sizes: tuple[int, ...]
    items: Tensor
    centroids: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        _check_codes(self.codes, self.codebook_sizes)
        _check_items(self.items, self.codes.shape[0])
        _check_centroids(self.centroids, self.codebook_sizes)

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __repr__(self) -> str:
        sizes = " x ".join(str(size) for size in self.codebook_sizes)
        return f"SemanticIndex({len(self):,} items, {sizes} codes, {self.colliding:,} items collide)"

    @property
    def levels(self) -> int:
        """Number of codes per item."""
        return self.codes.shape[1]

    @cached_property
    def colliding(self) -> int:
        """Number of items that share their codes with another item."""
        _, counts = torch.unique(self.codes, dim=0, return_counts=True)
        return int(counts[counts > 1].sum())

    @cached_property
    def trie(self) -> Trie:
        """The trie of valid ids, for constrained decoding; raises while items collide."""
        return build_trie(self.codes, self.codebook_sizes, self.items)

    def codes_of(self, items: Tensor) -> Tensor:
        """Return the codes [..., levels] of item numbers [...]. Raises for unknown items."""
        ordered, rows = self._sorted_items
        place = torch.searchsorted(ordered, items.contiguous()).clamp_(max=len(self) - 1)
        unknown = ordered[place] != items
        if bool(unknown.any()):
            raise ValueError(f"{int(unknown.sum())} items are not in the index, e.g. item {int(items[unknown][0])}")
        return self.codes[rows[place]]

    def items_of(self, codes: Tensor) -> Tensor:
        """Return the item numbers [...] of codes [..., levels]; -1 if no item has these codes."""
        if codes.shape[-1:] != (self.levels,):
            raise ValueError(f"codes have shape {tuple(codes.shape)}, expected [..., {self.levels}]")
        nodes = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
        for level in range(self.levels):
            nodes = self.trie.step(nodes, codes[..., level])
        return self.trie.items(nodes)

    def quality(self, embeddings: Tensor | None = None) -> Quality:
        """Measure collisions and codebook use. With embeddings (in the order of `codes`), also the error per level."""
        return measure_quality(self.codes, self.codebook_sizes, centroids=self.centroids, embeddings=embeddings)

    def to(self, device: torch.device | str) -> "SemanticIndex":
        """Return the index on another device."""
        return replace(
            self,
            codes=self.codes.to(device),
            items=self.items.to(device),
            centroids=tuple(table.to(device) for table in self.centroids),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file. An existing file is replaced only when the new one is complete."""
        header = {"schema": SCHEMA, "kind": "semantic_index", "codebook_sizes": list(self.codebook_sizes)}
        tensors = {"codes": self.codes, "items": self.items}
        tensors.update({f"centroids.{level}": table for level, table in enumerate(self.centroids)})
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        with replacing(Path(path)) as temporary:
            save_file(copies, temporary, metadata={_HEADER: json.dumps(header)})

    @cached_property
    def _sorted_items(self) -> tuple[Tensor, Tensor]:
        ordered = torch.sort(self.items)
        return ordered.values, ordered.indices


def load_index(path: str | os.PathLike[str]) -> SemanticIndex:
    """Load an index from a file written by `SemanticIndex.save`.

    Args:
        path: the safetensors file.

    Returns:
        The index.

    Raises:
        ValueError: the file is damaged or not an index; the message says what is wrong.

    Example:
        >>> load_index("index.safetensors").codes.shape
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _read_header(path, file.metadata())
            names = set(file.keys())
            levels = sum(name.startswith("centroids.") for name in names)
            expected = {"codes", "items", *(f"centroids.{level}" for level in range(levels))}
            if names != expected:
                raise ValueError(f"{path}: holds the tensors {sorted(names)}, expected {sorted(expected)}")
            centroids = tuple(file.get_tensor(f"centroids.{level}") for level in range(levels))
            codes, items = file.get_tensor("codes"), file.get_tensor("items")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error}); copy or build it again") from error
    try:
        return SemanticIndex(codes, tuple(header["codebook_sizes"]), items, centroids)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_header(path: str | os.PathLike[str], metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {})[_HEADER])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no JSON under {_HEADER!r} in its header: not a semantic index") from error
    if not isinstance(header, dict) or header.get("kind") != "semantic_index":
        raise ValueError(f"{path}: header says {header!r}, expected kind 'semantic_index'")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {header.get('schema')!r}, this version reads {SCHEMA}")
    sizes = header.get("codebook_sizes")
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise ValueError(f"{path}: codebook_sizes is {sizes!r}, expected a list of integers")
    return header


def _check_codes(codes: Tensor, codebook_sizes: tuple[int, ...]) -> None:
    if codes.dim() != 2 or codes.dtype != torch.int64 or codes.numel() == 0:
        raise ValueError(f"codes are {codes.dtype} {tuple(codes.shape)}, expected int64 [n_items, levels], not empty")
    if len(codebook_sizes) != codes.shape[1] or any(size < 1 for size in codebook_sizes):
        raise ValueError(f"codebook sizes {codebook_sizes}, expected {codes.shape[1]} positive ones, one per level")
    limits = torch.tensor(codebook_sizes, device=codes.device)
    bad = ((codes < 0) | (codes >= limits)).nonzero()
    if bad.numel():
        row, level = (int(place) for place in bad[0])
        raise ValueError(
            f"code {int(codes[row, level])} in row {row}, level {level} is outside [0, {codebook_sizes[level]}); {bad.shape[0]} such codes"
        )


def _check_items(items: Tensor, rows: int) -> None:
    if items.shape != (rows,) or items.dtype != torch.int64:
        raise ValueError(f"items are {items.dtype} {tuple(items.shape)}, expected int64 [{rows}], one per row of codes")
    if int(items.min()) < 0:
        raise ValueError(f"item {int(items.min())} is negative; -1 means 'no item' in every lookup")
    if torch.unique(items).numel() != rows:
        raise ValueError(f"{rows - torch.unique(items).numel()} item numbers repeat: expected distinct ones")


def _check_centroids(centroids: tuple[Tensor, ...], codebook_sizes: tuple[int, ...]) -> None:
    if len(centroids) > len(codebook_sizes):
        raise ValueError(f"{len(centroids)} centroid tables for {len(codebook_sizes)} levels")
    for level, table in enumerate(centroids):
        if table.dim() != 2 or table.shape != (codebook_sizes[level], centroids[0].shape[1]):
            raise ValueError(
                f"centroids of level {level} have shape {tuple(table.shape)}, expected [{codebook_sizes[level]}, d] with one d"
            )
