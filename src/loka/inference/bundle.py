"""A generative recommender in a folder: everything needed to recommend, without the data.

model.safetensors    the model, plain or quantized, with its configuration (loka.ptq.save)
index.safetensors    the semantic ids of the items
bundle.json          the data and training it came from
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loka.models.onerec import OneRec
from loka.ptq import Summary, load_quantized, save
from loka.records import BundleInfo, replacing
from loka.records import load as load_record
from loka.records import save as save_record
from loka.semantic_ids import SemanticIndex, load_index

if TYPE_CHECKING:
    from loka.data import SequenceData

MODEL, INDEX, INFO = "model.safetensors", "index.safetensors", "bundle.json"


@dataclass(frozen=True)
class Bundle:
    """A generative recommender.

    Args:
        model: the model, plain or quantized.
        summary: what is quantized.
        index: the semantic ids of the items.
        info: the data and training it came from.

    Example:
        >>> load_bundle("runs/onerec").info.data                                        # doctest: +SKIP
    """

    model: OneRec
    summary: Summary
    index: SemanticIndex
    info: BundleInfo

    def __post_init__(self) -> None:
        if self.index.codebook_sizes != self.model.config.codebooks:
            raise ValueError(
                f"the index has codebooks {self.index.codebook_sizes}, the model {self.model.config.codebooks}"
            )

    def open_data(
        self, name: str | None = None, *, root: Path | None = None, source: Path | None = None
    ) -> "SequenceData":
        """Open the data it was trained on, with the same options, or another data set of the same items.

        Args:
            name: name of a data set; None for the model's own.
            root: folder of raw data and caches.
            source: raw files of the data set.

        Returns:
            The sequences.

        Raises:
            ValueError: the index has items that the data do not.
        """
        from loka.data import load_sequences

        options: dict[str, Any] = dict(self.info.settings) if name in (None, self.info.data) else {}
        found = load_sequences(name or self.info.data, root=root, source=source, **options)
        if int(self.index.items.max()) > found.n_items:
            raise ValueError(
                f"the model knows items up to {int(self.index.items.max())}, {found.name} has {found.n_items}: "
                "not the data it was made from"
            )
        return found


def save_bundle(bundle: Bundle, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a bundle. bundle.json is written last, so that a folder with this file is complete.

    Args:
        bundle: the recommender.
        folder: folder to write.
        dtype: dtype of the weights that are not quantized.

    Example:
        >>> save_bundle(bundle, "runs/onerec-fp8")                                      # doctest: +SKIP
    """
    target = Path(folder)
    with replacing(target / MODEL) as model, replacing(target / INDEX) as index:
        save(bundle.model, bundle.summary, model, dtype=dtype)
        bundle.index.save(index)
        (target / INFO).unlink(missing_ok=True)  # a folder with this file is complete, also one that is written again
    save_record(bundle.info, target / INFO)


def is_bundle(folder: str | Path) -> bool:
    """Return True if a folder holds the bundle of a generative recommender.

    Args:
        folder: the folder.

    Returns:
        Whether it has a bundle.json.

    Example:
        >>> is_bundle("runs/nothing")
        False
    """
    return (Path(folder) / INFO).is_file()


def load_bundle(folder: str | Path, *, device: torch.device | str = "cpu") -> Bundle:
    """Load a bundle. Weights are converted to float32; quantized ones stay as they are.

    Args:
        folder: folder written by `save_bundle`.
        device: device of the model.

    Returns:
        The recommender.

    Example:
        >>> load_bundle("runs/onerec", device="cuda").model                             # doctest: +SKIP
    """
    source = Path(folder)
    if not is_bundle(source):
        raise ValueError(f"{source} holds no {INFO}; hint: loka train --model onerec --out {shlex.quote(str(source))}")
    info = load_record(source / INFO, BundleInfo)
    model, summary = load_quantized(source / MODEL, device=device)
    if not isinstance(model, OneRec):
        raise ValueError(f"{source}: expected a OneRec model, got {type(model).__name__}")
    return Bundle(model.float(), summary, load_index(source / INDEX), info)
