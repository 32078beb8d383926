"""Models of other libraries, small, with an input, and a loss of what they return. Nothing is downloaded: configurations are written here, data are random."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.units.example import tensors_in

BATCH = 32


@dataclass(frozen=True)
class Foreign:
    """A model, what it is called with, and a scalar to train it by."""

    model: nn.Module
    make_example: Callable[[torch.Generator], Any]

    def example(self, seed: int = 0) -> Any:
        return self.make_example(torch.Generator().manual_seed(seed))

    def call(self, example: Any) -> Any:
        if isinstance(example, dict):
            return self.model(**example)
        return self.model(*example)

    def loss(self, example: Any) -> Tensor:
        """Something every result takes part in."""
        found = [t.float() for t in tensors_in(self.call(example)) if t.is_floating_point() and t.requires_grad]
        return sum((t.square().mean() for t in found), torch.zeros(()))


def build_deepctr(name: str) -> Foreign:
    pytest.importorskip("deepctr_torch")
    import deepctr_torch.models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"c{i}", 50, embedding_dim=8) for i in range(4)] + [DenseFeat("d", 5)]
    kind = getattr(deepctr_torch.models, name)
    model = kind(
        columns, columns, dnn_hidden_units=(40, 24), dnn_dropout=0.2, device="cpu", dnn_use_bn=name == "DeepFM"
    )

    def example(generator: torch.Generator) -> tuple[Tensor]:
        ids = torch.randint(50, (BATCH, 4), generator=generator).float()
        return (torch.cat([ids, torch.randn(BATCH, 5, generator=generator)], 1),)

    return Foreign(model, example)


def build_torchrec_dlrm() -> Foreign:
    pytest.importorskip("torchrec")
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = ["a", "b", "c"]
    tables = [EmbeddingBagConfig(name=f"t_{k}", embedding_dim=16, num_embeddings=50, feature_names=[k]) for k in keys]
    model = DLRM(
        EmbeddingBagCollection(tables=tables),
        dense_in_features=7,
        dense_arch_layer_sizes=[40, 16],
        over_arch_layer_sizes=[40, 1],
    )

    def example(generator: torch.Generator) -> tuple[Tensor, Any]:
        lengths = torch.randint(0, 4, (len(keys) * BATCH,), generator=generator)
        values = torch.randint(50, (int(lengths.sum()),), generator=generator)
        dense = torch.randn(BATCH, 7, generator=generator)
        return dense, KeyedJaggedTensor.from_lengths_sync(keys=keys, values=values, lengths=lengths)

    return Foreign(model, example)


def build_transformers(name: str) -> Foreign:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=50
        )
        model = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.T5Config(
            vocab_size=100, d_model=32, d_kv=16, d_ff=50, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)

    def example(generator: torch.Generator) -> dict[str, Any]:
        ids = torch.randint(1, 100, (4, 9), generator=generator)
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "t5":
            found["labels"] = torch.randint(1, 100, (4, 5), generator=generator)
        elif name == "gpt2":
            found["labels"] = ids
        else:
            found["labels"] = torch.randint(2, (4,), generator=generator)
        return found

    return Foreign(model, example)


def build_recbole_sasrec() -> Foreign:
    pytest.importorskip("recbole")
    from recbole.model.sequential_recommender.sasrec import SASRec

    class Config(dict):  # the part of recbole's Config that a model reads
        def __getitem__(self, key: str) -> Any:
            return self.get(key)

    class Dataset:
        def num(self, field: str) -> int:
            return 60

    config = Config(
        USER_ID_FIELD="user_id", ITEM_ID_FIELD="item_id", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="item_length", NEG_PREFIX="neg_",
        MAX_ITEM_LIST_LENGTH=12, device="cpu", n_layers=2, n_heads=2, hidden_size=32, inner_size=50, hidden_dropout_prob=0.1,
        attn_dropout_prob=0.1, hidden_act="gelu", layer_norm_eps=1e-12, initializer_range=0.02, loss_type="CE",
    )  # fmt: skip
    model = SASRec(config, Dataset())

    def example(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(1, 13, (BATCH,), generator=generator)
        items = torch.randint(1, 60, (BATCH, 12), generator=generator)
        return items * (torch.arange(12) < lengths[:, None]), lengths

    return Foreign(model, example)


def build_torchfm(name: str) -> Foreign:
    pytest.importorskip("torchfm")
    import importlib

    import numpy as np

    if not hasattr(np, "long"):  # the library is older than the numpy that took the name away
        np.long = np.int64  # type: ignore[attr-defined]
    module, kind = {"dcn": ("dcn", "DeepCrossNetworkModel"), "afi": ("afi", "AutomaticFeatureInteractionModel"), "wd": ("wd", "WideAndDeepModel")}[name]  # fmt: skip
    found = getattr(importlib.import_module(f"torchfm.model.{module}"), kind)
    dims = [20, 30, 40]
    if name == "afi":
        model = found(
            dims, embed_dim=8, atten_embed_dim=12, num_heads=2, num_layers=2, mlp_dims=(20, 12), dropouts=(0.1, 0.1)
        )
    elif name == "dcn":
        model = found(dims, embed_dim=8, num_layers=2, mlp_dims=(20, 12), dropout=0.1)
    else:
        model = found(dims, embed_dim=8, mlp_dims=(20, 12), dropout=0.1)

    def example(generator: torch.Generator) -> tuple[Tensor]:
        return (torch.stack([torch.randint(size, (BATCH,), generator=generator) for size in dims], 1),)

    return Foreign(model, example)


BUILDERS: dict[str, Callable[[], Foreign]] = {
    **{
        f"deepctr-{name}": (lambda name=name: build_deepctr(name))
        for name in ("DeepFM", "xDeepFM", "DCN", "AutoInt", "DCNMix")
    },
    "torchrec-DLRM": build_torchrec_dlrm,
    **{f"transformers-{name}": (lambda name=name: build_transformers(name)) for name in ("gpt2", "bert", "t5")},
    "recbole-SASRec": build_recbole_sasrec,
    **{f"torchfm-{name}": (lambda name=name: build_torchfm(name)) for name in ("dcn", "afi", "wd")},
}


def build(name: str) -> Foreign:
    torch.manual_seed(0)
    foreign = BUILDERS[name]()
    with torch.no_grad():  # gains and biases away from one and zero, as in a trained model
        for p in foreign.model.parameters():
            p.add_(0.02 * torch.randn(p.shape))
    return foreign
