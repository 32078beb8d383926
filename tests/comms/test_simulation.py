"""The simulation: arithmetic that can be checked by hand, the published curves it claims, and verdicts that follow the network."""

import importlib
import sys
from pathlib import Path

import pytest

from loka.comms.simulation import ENCODE, MACHINES, Machine, Work, compare_codecs, simulate

ROUND = Machine("round", 4, 100e9, 50e9, "a test", efficiency=1.0, link_latency=0.0, network_latency=0.0)


def published() -> object:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # the script imports its neighbours
    try:
        return importlib.import_module("simulated_curves")
    finally:
        sys.path.pop(0)


def test_collectives_take_what_the_formulas_say() -> None:
    work = Work(0.1, 0.2, dense=1_000_000_000, overlap=False)
    inside, across = simulate(work, ROUND, gpus=(4, 8), codec="bf16")
    assert inside.dense == pytest.approx(2 * 3 / 4 * 2e9 / 100e9)
    assert across.dense == pytest.approx(2 * 7 / 8 * 2e9 / 50e9)
    (tables,) = simulate(Work(0.1, 0.2, embeddings=1_000_000_000), ROUND, gpus=(8,), codec="fp32")
    assert tables.tables == pytest.approx(2 * 4e9 * 4 / 8 / 12.5e9)  # a quarter of the node's network for each GPU


def test_a_collective_beside_a_long_pass_costs_one_bucket() -> None:
    (hidden,) = simulate(Work(0.1, 10.0, dense=1_000_000_000), ROUND, gpus=(8,), codec="bf16")
    (whole,) = simulate(Work(0.1, 10.0, dense=1_000_000_000, overlap=False), ROUND, gpus=(8,), codec="bf16")
    assert hidden.dense == pytest.approx(whole.dense * 25e6 / 4e9)


def test_encoding_is_paid_for() -> None:
    (step,) = simulate(Work(0.1, 0.2, embeddings=1_000_000), ROUND, gpus=(8,), codec="e4m3:1x128:pow2")
    assert step.coding == pytest.approx(4e6 / ENCODE)
    (plain,) = simulate(Work(0.1, 0.2, embeddings=1_000_000), ROUND, gpus=(8,), codec="bf16")
    assert plain.coding == 0.0


def test_one_gpu_sends_nothing() -> None:
    (step,) = simulate(Work(0.1, 0.2, dense=10**9, embeddings=10**8), ROUND, gpus=(1,), codec="e4m3:1x128:pow2")
    assert step.step == pytest.approx(0.3)


def test_the_verdict_follows_the_network() -> None:
    tables = Work(4e-3, 8e-3, dense=10_000_000, embeddings=26 * 128 * 8192)
    ((_, _, slow),) = compare_codecs(tables, MACHINES["h200-100g"], gpus=(64,))
    small = Work(2e-3, 4e-3, dense=10_000_000)
    ((_, _, fast),) = compare_codecs(small, MACHINES["h200-ndr"], gpus=(64,))
    ((_, _, tiny),) = compare_codecs(Work(40e-3, 80e-3, dense=10_000_000), MACHINES["h200-ndr"], gpus=(64,))
    assert (slow, fast, tiny) == ("e4m3:1x128:pow2", "bf16", "fp32")


def test_which_published_curves_are_within_fifteen_percent() -> None:
    """Those the guide names, of the curves that were there first and of those that were added when the simulation was done; and no others."""
    module = published()
    first, later = (
        [curve.name for curve in curves if module.worst(module.predict(curve)) < 15]
        for curves in (module.CURVES, module.LATER)
    )
    assert first == [
        "BERT-large, sequences of 128, TF32", "Transformer-XL large, mixed precision", "Transformer-XL large, FP32",
    ]  # fmt: skip
    assert [name.removeprefix("BERT-large (TF2), ") for name in later] == [
        "128, mixed precision, DGX A100", "128, TF32, DGX A100", "512, mixed precision, DGX A100",
    ]  # fmt: skip


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        list(simulate(Work(1, 2), MACHINES["h200-ndr"], gpus=(12,)))
    with pytest.raises(ValueError, match="ddp sends no weights"):
        list(simulate(Work(1, 2), MACHINES["h200-ndr"], gpus=(8,), weights="bf16"))
    with pytest.raises(ValueError, match=r"strategy.*zero"):
        Work(1, 2, strategy="zero")
