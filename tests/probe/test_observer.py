"""Cadence, memory, files and ranks: what a probe does besides looking."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from comms.ranks import on_ranks
from loka.probe import Probe
from loka.probe.observer import assign_slots

from .small import Small, batches, train


def make(seed: int = 0, **options: object) -> tuple[Small, Probe]:
    torch.manual_seed(seed)
    model = Small()
    return model, Probe(model, **options)


def test_sites_take_turns() -> None:
    model, probe = make(every=4, stagger=2)
    seen = []
    for x, _ in batches(8):
        model(x).sum().backward()
        probe.step()
        seen.append(tuple(probe.watch(site).calls for site in ("first", "twice", "last")))
    steps = [
        tuple(b - a for a, b in zip(before, after, strict=True))
        for before, after in zip([(0, 0, 0), *seen], seen, strict=False)
    ]
    assert [any(step) for step in steps] == [True, False, True, False] * 2
    assert steps[0] != steps[2]
    assert steps[:4] == steps[4:]
    assert seen[-1] == (2, 4, 2)  # once in four steps each; one module is called twice


def test_the_default_leaves_steps_between_looks() -> None:
    assert len(make(every=100)[1]._slots) == 4
    assert len(make(every=50)[1]._slots) == 2
    assert len(make(every=10)[1]._slots) == 1


def test_groups_cost_about_the_same() -> None:
    model = nn.Sequential(*[nn.Linear(8 * (i + 1), 8) for i in range(12)])
    probe = Probe(model)
    slots = assign_slots(list(probe._watches.values()), 3)
    costs = [sum(w.k**2 + w.n**2 for w in slot) for slot in slots]
    assert max(costs) < 1.2 * min(costs)
    assert sorted(w.name for slot in slots for w in slot) == sorted(probe.sites)


@pytest.mark.parametrize(
    "options", [{"stagger": 0}, {"stagger": 200}, {"snapshot_every": 0}, {"kinds": ["conv"]}, {"memory_budget": 3}]
)
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make(**options)


def test_eval_mode_with_gradients_is_seen_and_without_is_not() -> None:
    model, probe = make(every=1)
    model.eval()
    x = batches(1)[0][0]
    model(x).sum().backward()
    with torch.inference_mode():
        model(x)
    probe.step()
    assert probe.watch("first").calls == 1


def test_a_forward_without_backward_counts_as_a_call_without_gradient() -> None:
    model, probe = make(every=1)
    model(batches(1)[0][0])
    probe.step()
    assert probe.watch("first").gemms == ["fprop"]
    assert not probe.watch("first")._pending  # nothing is held on to


def test_a_second_backward_is_not_a_second_gradient() -> None:
    model, probe = make(every=1)
    loss = model(batches(1)[0][0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    probe.step()
    (stats,) = [s for s in probe.watch("last").describe() if s.role == "dy"]
    assert stats.elements == 48


def test_gradient_accumulation_is_two_looks() -> None:
    model, probe = make(every=1, rows=32)
    for x, _ in batches(2):
        model(x).sum().backward()
    probe.step()
    assert probe.watch("first").calls == 2
    assert probe.watch("first").steps == 1
    assert probe.watch("first").reservoir.seen == 64


def test_transposed_inputs_are_sampled_without_a_copy_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2))
    probe = Probe(model, every=1, rows=8)
    x = torch.randn(5, 6, 7).transpose(1, 2)  # 35 rows
    model(x).sum().backward()
    probe.step()
    rows = probe.watch("0").reservoir.x
    assert rows.shape == (8, 6)
    assert all((x.reshape(-1, 6) == row).all(1).any() for row in rows)


def test_shared_weights_are_seen_under_both_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    model[2].weight = model[0].weight
    probe = Probe(model, every=1)
    model(batches(1)[0][0]).sum().backward()
    probe.step()
    assert [probe.watch(site).calls for site in ("0", "2")] == [1, 1]


def test_nan_batches_leave_the_distributions_finite() -> None:
    model, probe = make(every=1)
    for number, (x, _) in enumerate(batches(3)):
        if number == 1:
            x[3, 2], x[5, 0] = torch.nan, torch.inf
        model(x).sum().backward()
        probe.step()
    learned = probe.watch("first").learned
    assert learned is not None
    assert float(learned.gaussians["x"].count) == 3 * 48 - 2
    drawn = probe.watch("first").draw("x", "gaussian", 100, torch.Generator().manual_seed(0))
    assert bool(drawn.isfinite().all())
    model(torch.full((4, 12), torch.nan)).sum().backward()
    probe.step()
    assert float(learned.gaussians["x"].count) == 3 * 48 - 2
    assert bool(learned.gaussians["x"].mean.isfinite().all())


def states_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_resuming_equals_never_stopping(tmp_path: Path) -> None:
    options = {"every": 2, "rows": 16, "snapshot_every": 3}
    model, whole = make(**options)
    data = batches(9)
    train(model, data[:5], whole)
    middle = {name: value.clone() for name, value in model.state_dict().items()}
    whole.save(tmp_path / "probe.safetensors", wait=True)
    train(model, data[5:], whole)

    model.load_state_dict(middle)
    resumed = Probe(model, **options)
    resumed.load(tmp_path / "probe.safetensors")
    whole.detach()
    train(model, data[5:], resumed)
    assert resumed.steps == 9
    assert states_equal(resumed.state_dict(), whole.state_dict())


def test_saving_happens_by_itself_and_leaves_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "probe.safetensors"
    model, probe = make(every=1, snapshot_every=2, save_to=path)
    train(model, batches(4), probe)
    probe.wait()
    assert [p.name for p in path.parent.iterdir()] == ["probe.safetensors"]
    again = Probe(model, every=1)
    again.load(path)
    assert again.steps == 4
    assert states_equal(again.state_dict(), probe.state_dict())


def test_a_failed_save_is_not_silent(tmp_path: Path) -> None:
    model, probe = make(every=1)
    train(model, batches(1), probe)
    (tmp_path / "file").write_text("")
    probe.save(tmp_path / "file" / "probe.safetensors")
    with pytest.raises(ValueError, match="could not be saved"):
        probe.wait()
    (tmp_path / "torn").write_bytes(b"\x10\x00")
    with pytest.raises(ValueError, match="is not a probe's state"):
        probe.load(tmp_path / "torn")


def test_a_save_is_still_pending_after_an_interrupted_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, probe = make(every=1)
    probe.save(tmp_path / "probe.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(probe._saver._pending, "exception", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            probe.wait()
    assert probe._saver._pending is not None
    probe.wait()
    assert (tmp_path / "probe.safetensors").exists()


def test_merging_two_ranks_equals_one_that_saw_both() -> None:
    model, both = make(every=1, rows=64)
    parts = [Probe(model, every=1, rows=64) for _ in range(2)]
    for number, (x, _) in enumerate(batches(4)):
        for index, probe in enumerate(parts):
            probe._switch.on = number % 2 == index
        model(x).sum().backward()
        for probe in (both, *parts):
            probe.step()
    parts[0].merge(parts[1].state_dict())
    for site in ("first", "twice", "last"):
        one, merged = both.watch(site).learned, parts[0].watch(site).learned
        assert one is not None
        assert merged is not None
        assert parts[0].watch(site).calls == both.watch(site).calls
        for role in ("x", "dy"):
            torch.testing.assert_close(merged.gaussians[role].mean, one.gaussians[role].mean, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(
                merged.gaussians[role].covariance(), one.gaussians[role].covariance(), rtol=1e-4, atol=1e-6
            )
            assert torch.equal(merged.statistics[role].bins, one.statistics[role].bins)
        assert merged.reservoir.seen == one.reservoir.seen


@pytest.mark.parametrize("trained_first", [True, False])
def test_a_rank_that_trained_replaces_one_that_only_ran_forward(trained_first: bool) -> None:
    model, trained = make(every=1, rows=64)
    train(model, batches(2), trained)
    trained.detach()
    forward = Probe(model, every=1, rows=64)
    with torch.no_grad():
        model(100 * batches(1)[0][0])
    forward.step()
    mine, other = (trained, forward) if trained_first else (forward, trained)
    mine.merge(other.state_dict())
    watch = mine.watch("first")
    assert (watch.calls, watch.forward_only, mine._switch.ungraded) == (2, False, False)
    assert float(watch.reservoir.x.abs().max()) < 10, "only what was seen in training"
    if not trained_first:
        train(model, batches(1), mine)
        assert watch.calls == 3, "what was merged is kept when training begins here"


def test_ranks_that_only_ran_forward_give_way_to_training_together() -> None:
    model, one = make(every=1, rows=64)
    two, empty = Probe(model, every=1, rows=64), Probe(model, every=1, rows=64)
    empty._switch.on = False
    with torch.no_grad():
        model(batches(1)[0][0])
    for probe in (one, two, empty):
        probe.step()
    empty.merge(one.state_dict())
    empty.merge(two.state_dict())
    assert (empty.watch("first").calls, empty.watch("first").forward_only) == (2, True)
    train(model, batches(1), empty)
    assert (empty.watch("first").calls, empty.watch("first").forward_only) == (1, False)


def test_a_small_budget_lowers_the_cap_and_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 400), nn.ReLU(), nn.Linear(400, 1))
    probe = Probe(model, every=1, rows=16, memory_budget=4 * 2**20)
    assert probe.ledger.spent <= probe.ledger.budget
    model(torch.randn(32, 600)).sum().backward()
    probe.step()
    assert "block-diagonal" in probe.watch("0").covariance_kind
    assert probe.watch("0").draw("x", "gaussian", 5, torch.Generator()).shape == (5, 600)
    tight = Probe(model, every=1, rows=16, memory_budget=2**20)
    model(torch.randn(32, 600)).sum().backward()
    tight.step()
    assert tight.ledger.short == ["0"]
    assert tight.ledger.spent <= tight.ledger.budget
    assert "did not fit" in tight.watch("0").covariance_kind
    assert tight.watch("0").draw("x", "rows", 5, torch.Generator()).shape == (5, 600)
    with pytest.raises(ValueError, match="memory_budget"):
        tight.watch("0").draw("x", "gaussian", 5, torch.Generator())


def train_rank() -> dict[str, object]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Small()
    del model.idle  # DDP wants every parameter used
    parallel = nn.parallel.DistributedDataParallel(model)
    plain = nn.parallel.DistributedDataParallel(_copy(model))
    probe = Probe(model, every=1, rows=64)
    data = [pair for number, pair in enumerate(batches(4)) if number % 2 == rank]
    losses = [train(module, data, p) for module, p in ((parallel, probe), (plain, None))]
    alone, watch = dist.new_group([1]), probe.watch("first")
    if rank == 1:  # its rank in that group is 0: it must still recognize its own data
        seen = watch.rows_seen
        probe.gather(dst=1, group=alone)
        assert watch.rows_seen == seen
    probe.gather()
    return {"losses": losses, "seen": watch.rows_seen, "x": watch.reservoir.x}


def _copy(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    twin = Small()
    del twin.idle
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.slow
def test_two_ranks_train_as_without_and_gather() -> None:
    found = on_ranks(2, "probe.test_observer", "train_rank")[0]
    assert found["losses"][0] == found["losses"][1]
    assert found["seen"] == 4 * 48
    everything = torch.cat([x for x, _ in batches(4)])
    assert found["x"].shape == (64, 12)
    assert all((everything == row).all(1).any() for row in found["x"])
    mine = torch.cat([x for number, (x, _) in enumerate(batches(4)) if number % 2 == 0])
    own = sum(bool((mine == row).all(1).any()) for row in found["x"])
    assert 16 <= own <= 48  # both ranks are in the sample
