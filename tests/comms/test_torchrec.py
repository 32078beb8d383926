"""TorchRec with our codecs: the embeddings and gradients of one process up to the codec's rounding, whatever the sharding; refusals in place of substitutions."""

import pytest
import torch

from comms.ranks import on_ranks

pytest.importorskip("torchrec", reason="TorchRec is not installed: pip install 'loka[torchrec]'")

FORWARD, BACKWARD = "e4m3:1x32:e8m0", "e5m2:1x32:e8m0"


def alone(world: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and updated weights of one process: SGD on the mean of the ranks' gradients."""
    from comms.jobs_torchrec import collection, example

    ebc = collection()
    outputs = []
    for rank in range(world):
        out = ebc(example(rank)).values()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().div(world).backward()
        outputs.append(out.detach())
    return outputs, {name: p.detach() - p.grad for name, p in ebc.named_parameters()}


@pytest.mark.parametrize(("kind", "world"), [("table", 2), ("column", 2), ("row", 2), ("row", 4)])
def test_sharded_tables_exchange_encoded_embeddings(kind: str, world: int) -> None:
    outputs, weights = alone(world)
    results = on_ranks(world, "comms.jobs_torchrec", "pooled", kind, FORWARD, BACKWARD)
    from comms.jobs_torchrec import collection

    start = collection().state_dict()
    for expected, result in zip(outputs, results, strict=True):
        error = float((result["out"] - expected).norm() / expected.norm())
        assert 1e-3 < error < 0.04
        assert result["per_element"] <= 1.04
    for name, weight in weights.items():
        step = weight - start[name]
        error = float((results[0]["weights"][name] - weight).norm() / step.norm())
        assert 1e-3 < error < 0.15, name


def test_sixteen_bits_are_what_was_asked_for_on_gloo() -> None:
    outputs, _ = alone(2)
    results = on_ranks(2, "comms.jobs_torchrec", "pooled", "table", "bf16", "bf16")
    for expected, result in zip(outputs, results, strict=True):
        assert torch.equal(result["out"], expected.bfloat16().float())  # fp16, the silent replacement, has other values
        assert result["per_element"] == 2.0


def test_a_row_wise_table_is_refused_until_its_distribution_is_ours() -> None:
    with pytest.raises(AssertionError, match="distribute_rows"):
        on_ranks(2, "comms.jobs_torchrec", "pooled", "row", FORWARD, BACKWARD, False)


def test_blocks_that_do_not_fit_and_stochastic_codecs_are_refused() -> None:
    from loka.comms.torchrec import make_registry

    codec = make_registry(FORWARD, BACKWARD)["POOLED_EMBEDDINGS_ALL_TO_ALL"].forward
    with pytest.raises(ValueError, match="blocks of 32"):
        codec.calc_quantized_size(33)
    with pytest.raises(ValueError, match="stochastic"):
        make_registry("e4m3:1x32:stochastic")


@pytest.mark.parametrize(
    ("forward", "backward", "device", "reason"),
    [
        ("BF16", "FP16", "cpu", "forward bf16 on gloo becomes fp16"),
        ("FP16", "BF16", "cpu", "backward bf16 on gloo becomes fp16"),
        ("FP8", "FP32", "cuda", "forward fp8 of row-wise"),
        ("FP32", "MX4", "cuda", "backward mx4 of row-wise"),
        ("INT8", "FP32", "cpu", "int8 of row-wise"),
        ("FP16", "FP16", "cpu", None),
        ("BF16", "BF16", "cuda", None),
    ],
)
def test_every_substitution_of_torchrec_is_named(forward: str, backward: str, device: str, reason: str | None) -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

    from loka.comms.torchrec import refuse_substitutions

    config = QCommsConfig(forward_precision=CommType[forward], backward_precision=CommType[backward])
    if reason is None:
        refuse_substitutions(config, device=torch.device(device))
        return
    with pytest.raises(ValueError, match=reason):
        refuse_substitutions(config, device=torch.device(device))
