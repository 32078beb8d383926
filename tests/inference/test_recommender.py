"""Items in and out, bundles on disk, per-user metrics and the paired comparison of two arms."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.scripts import script
from loka.data.batch import Jagged
from loka.data.sequences import SequenceData
from loka.dispatch import RECIPES, Database
from loka.dispatch.rows import linear_variant, machine_here, origin_of
from loka.inference import (
    Bundle,
    Engine,
    EngineConfig,
    Recommender,
    compare_arms,
    evaluate_users,
    load_bundle,
    overlap_of,
    save_bundle,
)
from loka.inference.request import make_histories
from loka.inference.tuning import Tuning
from loka.kernels import registry
from loka.kernels.backend import YES
from loka.kernels.prepared import layout_of
from loka.measure import snapshot
from loka.models import configure
from loka.models.onerec import Experts
from loka.nn import MixtureOfExperts
from loka.ptq import quantize
from loka.records import BundleInfo, Interval, PairedTest, capture_environment
from loka.records.performance import PerformanceRow

from .small import make_index, make_model

make_trained_like, share_weights = (
    getattr(script("onerec_synthetic"), n) for n in ("make_trained_like", "share_weights")
)


def make_bundle(normalize: str = "codebook", **options: object) -> Bundle:
    model = make_model("tiny", **options)
    info = BundleInfo(
        data="toy", settings={}, steps=1, seed=0, loss=None, normalize=normalize, environment=capture_environment()
    )
    return Bundle(model, quantize(model, "none"), make_index(model, 60), info)


def make_data(items: int, users: int = 30) -> SequenceData:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (users,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(1, items + 1, (int(offsets[-1]),), generator=g)
    titles = ("", *(f"title {i}" for i in range(1, items + 1)))
    return SequenceData("toy", Jagged(values, offsets), items, item_keys=titles, titles=titles, texts=titles)


@pytest.fixture(scope="module")
def recommender() -> Recommender:
    bundle = make_bundle(items=100)
    engine = Engine(bundle.model, EngineConfig(beams=30, requests=(4,), dtype="fp32"), valid=bundle.index.trie)
    return Recommender(engine, bundle.index)


class TestRecommender:
    def test_unknown_items_are_dropped_and_counted(self, recommender: Recommender) -> None:
        known = recommender.index.items[:4]
        mixed = torch.cat([known[:2], torch.tensor([9999]), known[2:]])
        (a,), (b,) = (recommender.recommend([h], top=5) for h in (known, mixed))
        assert torch.equal(a.items, b.items)
        assert (a.dropped, b.dropped) == (0, 1)
        with pytest.raises(ValueError, match="item 9999 is not in the index"):
            replace(recommender, unknown="raise").recommend([mixed])

    def test_empty_and_wholly_unknown_histories(self, recommender: Recommender) -> None:
        found = recommender.recommend([torch.empty(0, dtype=torch.int64), torch.tensor([9999, 9998])], top=3)
        assert torch.equal(found[0].items, found[1].items)
        assert [f.dropped for f in found] == [0, 2]

    def test_seen_items_can_be_left_out(self, recommender: Recommender) -> None:
        (plain,) = recommender.recommend([recommender.index.items[:5]], top=3)
        (other,) = recommender.recommend([torch.cat([recommender.index.items[:5]])], top=3, exclude_seen=True)
        assert not set(other.items.tolist()) & set(recommender.index.items[:5].tolist())
        assert len(other.items) == len(plain.items) == 3

    def test_refusals(self, recommender: Recommender) -> None:
        with pytest.raises(ValueError, match="at least one"):
            recommender.recommend([torch.empty(0, dtype=torch.int64)], top=0)
        with pytest.raises(ValueError, match="constrained to valid ids"):
            Recommender(Engine(make_model("tiny"), EngineConfig(dtype="fp32", beams=4)), recommender.index)


def test_bundles_survive_the_disk(tmp_path: Path) -> None:
    bundle = make_bundle()
    save_bundle(bundle, tmp_path / "b", dtype=torch.float32)
    again = load_bundle(tmp_path / "b")
    assert again.info == bundle.info
    assert again.model.config == bundle.model.config
    for name, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    with pytest.raises(ValueError, match=r"holds no bundle\.json"):
        load_bundle(tmp_path)
    with pytest.raises(ValueError, match="codebooks"):
        replace(bundle, index=make_index(make_model("tiny", codebooks=(16, 16, 16))))


@pytest.mark.parametrize("normalize", ["codebook", "valid"])
def test_metrics_by_user_are_those_of_the_definitions(normalize: str) -> None:
    bundle = make_bundle(normalize)
    data = make_data(len(bundle.index))
    found = evaluate_users(bundle, data.test, beams=20, tops=(1, 10), batch=8)
    assert len(found.users) == len(data.test)
    targets = data.test.cut(found.users.numpy(), 100).targets.values
    hits = found.items == targets[:, None]
    assert torch.equal(found.values["recall@10"], hits[:, :10].any(1).double())
    rank = hits.double().argmax(1)
    expected = torch.where(hits[:, :10].any(1), 1 / torch.log2(rank.double() + 2), 0.0)
    torch.testing.assert_close(found.values["ndcg@10"], expected)
    assert bool((found.values["log-likelihood"] < 0).all())
    again = evaluate_users(bundle, data.test, beams=20, tops=(1, 10), batch=5)
    torch.testing.assert_close(again.values["log-likelihood"], found.values["log-likelihood"])
    assert torch.equal(again.items, found.items)


class TestArms:
    users = torch.arange(400)

    def arms(self, shift: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(0)
        base = torch.rand(400, generator=g).double()
        noise = 0.001 * torch.randn(400, generator=g).double()
        return {"recall@10": base, "log-likelihood": -1 - base}, {
            "recall@10": base * (1 + shift) + noise,
            "log-likelihood": (-1 - base) * (1 - shift) + noise,
        }

    def test_verdicts(self) -> None:
        for shift, outcome in ((0.0, "equivalent"), (0.05, "better"), (-0.05, "worse")):
            a, b = self.arms(shift)
            test = compare_arms(a, b, (self.users, self.users), margin=0.01, names=("a", "b"), data="toy")
            assert {m.outcome for m in test.metrics} == {outcome}
            assert test.metrics[0].change.value == pytest.approx(shift, abs=0.002)
            assert test.metrics[1].change.value == pytest.approx(shift, abs=0.002)
            assert not test.split.mismatch
            assert test.metrics[0].minimum_detectable < 0.01

    def test_a_lost_arm_is_seen_and_pairs_are_matched_by_user(self) -> None:
        a, b = self.arms(0.0)
        some = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:250]
        test = compare_arms(
            a, {k: v[some] for k, v in b.items()}, (self.users, some), margin=0.01, names=("a", "b"), data="toy"
        )
        assert test.split.mismatch
        assert test.metrics[0].users == 250
        assert test.metrics[0].outcome == "equivalent"

    def test_a_metric_without_an_interval_is_not_said_to_have_one(self) -> None:
        """Two hits in 400 users, the same in both arms: samples of users may have none."""
        a, b = self.arms(0.0)
        hits = (torch.arange(400) < 2).double()
        test = compare_arms({**a, "hits": hits}, {**b, "hits": hits}, (self.users, self.users), margin=0.01, names=("a", "b"), data="t")  # fmt: skip
        (said,) = (note for note in test.notes if note.startswith("hits "))
        assert "too few for an interval" in said

    def test_refusals(self) -> None:
        a, b = self.arms(0.0)
        with pytest.raises(ValueError, match="only one arm has"):
            compare_arms(
                a, {"recall@10": b["recall@10"]}, (self.users, self.users), margin=0.01, names=("a", "b"), data="t"
            )
        zero = {"recall@10": torch.zeros(400).double()}
        with pytest.raises(ValueError, match="zero for every user"):
            compare_arms(zero, zero, (self.users, self.users), margin=0.01, names=("a", "b"), data="t")

    def test_overlap(self) -> None:
        bundle = make_bundle()
        found = evaluate_users(bundle, make_data(len(bundle.index)).test, beams=20)
        assert [(o.n, o.share) for o in overlap_of(found, found, (10, 50))] == [(10, 1.0)]


class TestSynthetic:
    def test_statistics_and_skew(self) -> None:
        config = configure(
            "onerec", "tiny-moe", d=64, heads=4, experts=Experts(routed=16, top=2, hidden=64, dense_blocks=1)
        )
        model = make_trained_like(config, device="cpu", dtype=torch.float32, skew=2.5)
        weight = model.blocks[0].attention.qkv.weight.detach()
        assert float(weight.var()) == pytest.approx(1 / 64, rel=0.4)
        moe = next(m for m in model.modules() if isinstance(m, MixtureOfExperts))
        chosen, gates = moe.route(torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)))
        load = torch.bincount(chosen.flatten(), minlength=16).float()
        assert float(load.max() / load.mean()) >= 2.0
        torch.testing.assert_close(gates.sum(1), torch.ones(4096))
        found = Engine(model, EngineConfig(beams=8, requests=(2,), dtype="fp32")).generate(
            make_histories(config, 2, 16)
        )
        assert all(bool(f.scores.isfinite().all()) for f in found)

    def test_shared_weights_are_shared_and_the_trees_are_not(self) -> None:
        model = make_model("tiny")
        twin = share_weights(model)
        assert twin.blocks[0].cross.query.weight is model.blocks[0].cross.query.weight
        quantize(twin)
        assert type(model.blocks[0].cross.query) is torch.nn.Linear


def test_tuning_measures_refuses_and_writes_down() -> None:
    model = make_model(
        "tiny-moe", d=128, heads=4, layers=2, d_ff=128, experts=Experts(routed=4, top=2, hidden=128, dense_blocks=1)
    )
    quantize(model)
    engine = Engine(model, EngineConfig(beams=4, requests=(2,), dtype="fp32"))
    tuning = Tuning(engine.packed, torch.float32, fixed=set(), measure=True, database=Database(":memory:"))
    tuned = tuning.tuned(8)
    assert {t.role for t in tuning.log} == {"query", "cross_out", "qkv", "self_out", "experts"}
    for (
        entry
    ) in tuning.log:  # no backend but the reference runs here: all are refused, with reasons, and the registry decides
        assert entry.chosen == "auto"
        assert entry.refused
        assert not entry.microseconds
    assert tuned.blocks[0].query.bound.backend == "auto"
    assert tuning.tuned(8) is tuned
    assert (
        Tuning(engine.packed, torch.float32, fixed={"scaled_mm", "grouped_mm"}, measure=True)
        .tuned(8)
        .blocks[0]
        .query.bound.backend
        == "auto"
    )


class Able:
    """A backend that runs anything, by the law."""

    def __init__(self, name: str) -> None:
        self.law = registry.backend("scaled_mm", "reference")
        self.name = name

    def supports(self, call: object, device: torch.device) -> object:
        return YES

    def run(self, *operands: object, **options: object) -> object:
        return self.law.run(*operands, **options)


def test_tuning_takes_the_fastest_row_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "triton"):
        monkeypatch.setitem(registry._LOADED, f"scaled_mm.{name}", Able(name))
    model = make_model("tiny")
    quantize(model, "rowwise", keep=("heads.*", "context.*"))
    engine = Engine(model, EngineConfig(beams=4, requests=(2,), dtype="fp32"))
    here, operands, width = snapshot(), RECIPES["rowwise"].fprop, model.config.d
    versions = machine_here(here).versions
    variant = linear_variant(
        "fprop", str(operands.a), str(operands.b), fast_accum=operands.fast_accum, weights="cached"
    )
    with Database(":memory:") as database:
        for name, time in (("torch", 9.0), ("triton", 7.0)):
            row = PerformanceRow(op="linear", variant=variant, m=8, k=width, n=width, backend=name, version=versions[name], microseconds=Interval(value=time, low=time, high=time))  # fmt: skip
            database.add(origin_of(here), [row])
        tuning = Tuning(engine.packed, torch.float32, fixed={"grouped_mm"}, measure=True, database=database)
        tuned = tuning.tuned(8)
        found = {entry.role: entry for entry in tuning.log}
        assert (found["query"].chosen, found["query"].microseconds) == ("triton", {"torch": 9.0, "triton": 7.0})
        assert tuned.blocks[0].query.bound.backend == "triton"
        assert found["qkv"].chosen == "auto"  # another width: no row, and nothing is timed without a GPU
        assert "no row" in found["qkv"].refused["torch"]
        assert tuning.tuned(16).blocks[0].query.bound.backend == "auto"  # another bucket


def test_packed_weights_are_laid_out_for_their_backend() -> None:
    model = make_model("tiny-moe", d=40, heads=4, d_ff=40, experts=Experts(routed=4, top=2, hidden=40, dense_blocks=1))
    quantize(model)
    engine = Engine(model, EngineConfig(beams=4, requests=(2,), dtype="fp32"))
    linear = engine.packed.blocks[0].query
    for name in ("torch", "triton", "fbgemm"):
        moved = linear.on(name)
        assert moved.bound.backend == name
        assert layout_of(moved.weight)[0] == name
        assert torch.equal(moved.weight.dequantize(), linear.weight.dequantize())
        assert moved.on(name).weight is moved.weight
    experts = engine.packed.blocks[1].ffn
    moved = experts.on("triton", fused=True)
    assert (moved.backend, moved.fused, layout_of(moved.gate_up)[0]) == ("triton", True, "triton")
    assert torch.equal(moved.down.dequantize(), experts.down.dequantize())


def test_tuning_never_fuses_an_activation_the_kernel_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOKA_DB", str(tmp_path / "rows.sqlite"))
    experts = Experts(routed=4, top=2, hidden=32, dense_blocks=1)
    model = make_model("tiny-moe", activation="relu", experts=experts)
    engine = Engine(model, EngineConfig(beams=4, requests=(2,), dtype="fp32", tune=True))
    engine.generate(make_histories(model.config, 2, 5))
    assert engine.tuning.log
    assert not any("fused" in name for entry in engine.tuning.log for name in (entry.chosen, *entry.microseconds))
    assert not engine.tuning.tuned(2).blocks[1].ffn.fused


def test_a_metric_that_nobody_scores_is_noted_and_the_others_are_compared() -> None:
    users = torch.arange(40)
    nothing, some = torch.zeros(40, dtype=torch.float64), 1 + torch.arange(40, dtype=torch.float64)

    def compare(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> PairedTest:
        return compare_arms(first, second, (users, users), margin=0.1, names=("a", "b"), data="toy")

    found = compare({"recall": nothing, "likelihood": some}, {"recall": some, "likelihood": some})
    assert [metric.metric for metric in found.metrics] == ["likelihood"]
    assert "recall is zero" in found.notes[0]
    rare = (users == 7).double()
    found = compare({"recall": rare, "likelihood": some}, {"recall": rare, "likelihood": some})
    assert [metric.metric for metric in found.metrics] == ["likelihood"]
    assert "recall is nonzero for only 1 of 40 users" in found.notes[0]
    with pytest.raises(ValueError, match=r"recall is nonzero for only 1 of 40 users.*hint: more users"):
        compare({"recall": rare}, {"recall": rare})
    with pytest.raises(ValueError, match="recall: zero for every user"):
        compare({"recall": nothing}, {"recall": some})


def test_the_command_of_a_hint_can_be_copied_with_a_space_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    with pytest.raises(ValueError, match=re.escape(f"hint: loka train --model onerec --out '{folder}'")):
        load_bundle(folder)
