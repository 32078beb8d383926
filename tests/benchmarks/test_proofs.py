"""What the scripts behind the published comparisons decide from their measurements."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.benchmarks.scripts import script

trained, hurts, shapes, tune_zoo, onerec_quality = (
    script(name) for name in ("trained", "hurts", "shapes", "tune_zoo", "onerec_quality")
)


def test_the_27_shapes_have_the_published_ends() -> None:
    found = shapes.make_shapes()
    assert len(set(found)) == 27
    assert (found[0], found[-1]) == ((2048, 256, 768), (2048, 123200, 1024))
    assert all(k % 16 == 0 and n % 16 == 0 for _, k, n in found)


def test_shapes_are_summarised_by_the_fastest() -> None:
    row = {
        "recipe": "rowwise",
        "backend": "torch",
        "gemm_microseconds": 6.0,
        "quantisation_share": 0.4,
        "tflops": 100.0,
    }
    fast = row | {"microseconds": {"value": 10.0}, "speedup": {"value": 1.5}}
    slow = row | {"backend": "triton", "microseconds": {"value": 20.0}, "speedup": {"value": 0.75}}
    body = {"peaks": {"fp8_flops": 1e15}, "data_sheet_flops": 2e15}
    summary = shapes.summarise({"a": [slow, fast, {"recipe": "blockwise", "refusal": "no"}]}, body)
    assert summary["the fastest of a shape"]["mean_speedup"] == 1.5
    assert summary["the fastest of a shape"]["share_of_data_sheet_peak"] == pytest.approx(0.05)
    assert summary["rowwise on triton"]["shapes"] == 1


def runs_of(changes: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"wukong/d/{arm}/{seed}": {"log_loss": loss, "log_losses": [loss], "peak_gib": 2.0}
        for arm, losses in changes.items()
        for seed, loss in enumerate(losses)
    }


def test_a_row_has_speed_memory_and_loss_of_one_configuration() -> None:
    runs = runs_of({"bf16": [0.5, 0.6, 0.7], "tuned": [0.50001, 0.60001, 0.70001]})
    steps = {"wukong/d/bf16": {"ms": 3.0}, "wukong/d/tuned": {"ms": 2.0}}
    (row,) = trained.summarise(runs, steps)
    assert (row["arm"], row["against"], row["seeds"], row["speedup"]) == ("tuned", "bf16", 3, 1.5)
    assert row["peak_gib"] == [2.0, 2.0]
    assert row["label 0"]["change"] == pytest.approx(1e-5 / 0.6, rel=0.1)
    assert row["label 0"]["verdict"] == "equivalent"


def test_seeds_without_a_partner_are_not_compared() -> None:
    runs = runs_of({"bf16": [0.5], "tuned": [0.5, 0.6, 0.7]})
    assert trained.summarise(runs, {}) == []


def test_power_comes_from_an_earlier_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ablation.json"
    rows = [
        {"data": "d", "variant": "none", "precision": kind, "seed": seed, "log_loss": loss}
        for seed, pair in enumerate(((1.0, 1.001), (1.0, 1.0), (1.0, 0.999)))
        for kind, loss in zip(("bf16", "planned"), pair, strict=True)
    ]
    file.write_text(json.dumps({"runs": rows}))
    monkeypatch.setattr(trained, "BEFORE", file)
    assert trained.find_power("d", 4)["spread"] == pytest.approx(0.001)
    assert trained.find_power("d", 4)["standard_error"] == pytest.approx(0.0005)
    assert trained.find_power("other", 4) is None


def test_a_data_set_ends_when_every_change_is_decided() -> None:
    def runs(naive: float, planned: float, seeds: int = 4) -> dict[str, Any]:
        noise = [1 + 1e-6 * s for s in range(seeds)]
        arms = {"bf16": 1.0, "naive": naive, "planned": planned}
        return {
            f"d/{arm}/{s}": {"log_losses": [0.5 * x * noise[s]], "along": [{"test_losses": [0.5 * x * noise[s]], "biases": {"a": x}}] * 2}
            for arm, x in arms.items()
            for s in range(seeds)
        }  # fmt: skip

    decided = hurts.summarise(runs(1.05, 1.00001))
    assert hurts.is_decided(decided, "d", 4)
    assert not hurts.is_decided(decided, "d", 5)
    assert not hurts.is_decided(hurts.summarise(runs(1.05, 1.0, seeds=1)), "d", 1)
    lost = runs(1.05, 1.0)
    lost["d/naive/0"]["along"] = [lost["d/naive/0"]["along"][0], {"test_losses": [None], "biases": {"a": 1.0}}]
    assert [(row["arm"], row["half"]) for row in hurts.summarise(lost) if row["diverged"]] == [("naive", "later")]
    grown = {row["arm"]: row["change"] for row in hurts.summarise_biases(runs(1.05, 1.0))}
    assert grown == {"naive": pytest.approx(0.05), "planned": pytest.approx(0.0)}


def test_the_typical_look_of_half_of_a_run() -> None:
    looks = [{"test_losses": [loss, 1.0]} for loss in (9.0, 9.0, 9.0, 2.0, 3.0, 400.0)]
    assert hurts.typical(looks) == [3.0, 1.0]
    assert hurts.typical(looks, "earlier") == [9.0, 1.0]
    looks[-1]["test_losses"] = [None, 1.0]
    assert hurts.typical(looks) == [None, 1.0]


def test_raw_integers_keep_their_range() -> None:
    drawn = hurts.draw_criteo(20_000, 1, "cpu")
    largest = drawn.dense.amax(0)
    assert drawn.dense.shape[1] % 16 == 0
    assert largest[4] > 1e5
    assert (largest[:13] <= largest.new_tensor([row[3] for row in hurts.INTEGERS])).all()
    assert 0.1 < float(drawn.labels.mean()) < 0.4


def test_a_fresh_process_is_judged_by_time_and_by_what_it_runs() -> None:
    record = {"step_microseconds": {"bf16": 30.0, "bf16 layout": 24.0, "loka": 20.0}, "speedup": {"value": 1.5}}
    here = {"bf16": 30.0, "again": 20.4, "everything": 18.0, "torchao": 17.0}
    found = tune_zoo.judge(record, here, graphed=True)
    assert found["over_tune"] == pytest.approx(1.02)
    assert found["over_best_by_hand"] == pytest.approx(20.4 / 18)  # torchao is no way by hand of ours
    assert found["over_torchao"] == pytest.approx(1.2)
    assert "over_tune" not in tune_zoo.judge(record, here, graphed=False)
    after = {"modules": {"": "DLRM"}, "outputs": [1.0, 2.0], "kernels": ["1 x a"], "model_gib": 1.0, "peak_gib": 2.0}
    row = {"record": {"conversion": None}, "after": after | {"peak_gib": 2.2, "kernels": ["1 x b"]}}
    seen = tune_zoo.compare(row, None, after)
    assert seen["same_modules"]
    assert seen["same_conversion"]
    assert seen["memory_after_tune"]["peak_gib"] == pytest.approx(1.1)
    assert (seen["kernels_only_here"], seen["kernels_only_in_tune"]) == (["1 x a"], ["1 x b"])


def test_seeds_of_a_user_are_one_observation() -> None:
    def seed(shift: float) -> dict[str, dict[str, np.ndarray]]:
        base = np.array([1.0, 2.0, 3.0, 4.0]) + shift
        return {"bf16": {"recall@10": base}, "fp8": {"recall@10": base * 1.02}, "fp8 mixed": {"recall@10": base}}

    found = onerec_quality.pool([seed(0.0), seed(2.0)])
    assert found["seeds"] == 2
    assert found["arms"]["bf16"]["recall@10"] == 3.5
    assert found["fp8 against bf16"]["recall@10"]["users"] == 4
    assert found["fp8 against bf16"]["recall@10"]["percent"] == pytest.approx(2.0)
    assert found["fp8 mixed against bf16"]["recall@10"]["verdict"] == "inconclusive"  # 4 users show nothing


def test_seeds_are_pooled_over_the_users_and_arms_that_all_have() -> None:
    def seed(users: int, *arms: str) -> dict[str, dict[str, np.ndarray]]:
        return {arm: {"recall@10": np.arange(1.0, users + 1)} for arm in ("bf16", *arms)}

    found = onerec_quality.pool([seed(6, "fp8", "fp8 mixed"), seed(4, "fp8")])
    assert found["fp8 against bf16"]["recall@10"]["users"] == 4
    assert set(found["arms"]) == {"bf16", "fp8"}
    assert "fp8 mixed against bf16" not in found


def test_arms_answer_the_same_users_until_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def answer(task: Any, arm: str, users: torch.Tensor, *_: Any) -> dict[str, Any]:
        clock[0] += 1.0
        if arm == "fp8 mixed" and int(users[0]) == 4:
            raise RuntimeError("no kernel")
        return {"items": users[:, None], "values": {"recall@10": users.double()}}

    monkeypatch.setattr(onerec_quality, "PIECE", 4)
    monkeypatch.setattr(onerec_quality, "answer", answer)
    monkeypatch.setattr(onerec_quality, "make_engine", lambda task, name, *_: (name,))
    monkeypatch.setattr(onerec_quality.time, "time", lambda: clock[0])
    users = torch.arange(40)
    arms, failed = onerec_quality.ask(None, users, users, None, {}, 111.0)
    assert set(arms) == {"bf16", "fp8", "fp16"}
    assert failed == {"fp8 mixed": "RuntimeError: no kernel"}
    assert all(torch.equal(arm["values"]["recall@10"], users[:8].double()) for arm in arms.values())
    arms, _ = onerec_quality.ask(None, users, users, None, {}, 0.0)
    assert len(arms["bf16"]["items"]) == 4  # late as it is, somebody is asked


def test_claims_compare_a_model_in_the_modes_that_both_sides_have() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
    from tables import published  # type: ignore[import-not-found]

    rows = [("bf16", 4.0), ("bf16+max", None), ("loka", 2.5), ("loka+max", 2.0)]
    plain = {"rows": [{"model": "m", "way": way, "ms": ms} for way, ms in rows]}
    verdict, text = published._inference(plain, {"rows": []})
    assert "m 1.60x" in text
    assert verdict == published.REFUTED


def test_a_claim_without_its_record_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
    from tables import published

    monkeypatch.setattr(published, "read", lambda name: {"x": 1} if name == "a.json" else None)
    claims = (
        ("needs", "", "a.json, b.json", lambda a, b: ("never", "")),
        ("may have", "", "a.json, b.json?", lambda a, b: ("seen", str((a, b)))),
    )
    monkeypatch.setattr(published, "CLAIMS", claims)
    needs, may = published.published_table().splitlines()[2:]
    assert published.OPEN in needs
    assert "seen" in may
    assert "b.json" not in may
