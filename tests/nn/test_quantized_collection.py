"""TorchRec's quantised tables in ours: the same values, and what another row format changes is told."""

from typing import Any

import pytest
import torch

from loka.comms.torchrec import refuse_rounding
from loka.nn.quantized_collection import take_quantized


def quantized(dtype: torch.dtype) -> tuple[Any, Any]:
    pytest.importorskip("torchrec", reason="TorchRec is not installed: pip install 'loka[torchrec]'")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, QuantConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.quant.embedding_modules import EmbeddingBagCollection as Quantized
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    tables = [
        EmbeddingBagConfig(name="a", num_embeddings=20, embedding_dim=16, feature_names=["a"]),
        EmbeddingBagConfig(name="b", num_embeddings=9, embedding_dim=24, feature_names=["b"], pooling=PoolingType.MEAN),
    ]
    plain = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    observer = torch.ao.quantization.PlaceholderObserver
    plain.qconfig = QuantConfig(observer.with_args(dtype=torch.float32), observer.with_args(dtype=dtype))
    jagged = KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"], values=torch.tensor([1, 19, 3, 4, 5, 0, 8]), lengths=torch.tensor([2, 0, 1, 1, 3, 0])
    )
    return Quantized.from_float(plain), jagged


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.float16])
def test_the_values_are_those_of_torchrec(dtype: torch.dtype) -> None:
    collection, jagged = quantized(dtype)
    expected, tables = collection(jagged).to_dict(), take_quantized(collection)
    for name, table in tables.items():
        part = jagged.to_dict()[name]
        found = table(part.values(), part.offsets()[:-1])
        torch.testing.assert_close(
            found, expected[name].float(), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5
        )
        assert table.worst_error == 0.0
        assert not table.is_trainable


def test_what_another_format_changes_is_told() -> None:
    collection, _ = quantized(torch.qint8)
    exact, rounded = take_quantized(collection), take_quantized(collection, rows="int8:row")
    for name, table in rounded.items():
        change = float((table.weight - exact[name].weight).abs().max())
        assert table.worst_error == pytest.approx(change)
        assert 0 < change <= float(exact[name].weight.abs().max()) / 127 * 0.51


def test_an_unquantised_collection_is_refused() -> None:
    with pytest.raises(ValueError, match="quantize_tables"):
        take_quantized(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "stochastic", "device", "reason"),
    [
        ("FP16", True, "cpu", "rounded to nearest"),
        ("FP8", True, "cuda", "rounded to nearest"),
        ("INT8", False, "cuda", "trains no INT8"),
        ("BF16", True, "cpu", "trains no BF16"),
        ("FP16", True, "cuda", None),
        ("FP16", False, "cpu", None),
        ("FP32", True, "cpu", None),
    ],
)
def test_a_rounding_that_would_be_replaced_is_refused(
    kind: str, stochastic: bool, device: str, reason: str | None
) -> None:
    if reason is None:
        refuse_rounding(kind, stochastic=stochastic, device=torch.device(device))
        return
    with pytest.raises(ValueError, match=reason):
        refuse_rounding(kind, stochastic=stochastic, device=torch.device(device))
