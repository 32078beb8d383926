"""The observer never hurts: what goes wrong switches a site off, nothing raises into training, nothing changes a bit, and wrapped models are seen through."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from loka.probe import Adapter, Probe, Report
from loka.probe.adapter import _REGISTERED
from loka.probe.statistics import Statistics

from .small import Small, batches, train


@pytest.fixture
def group(tmp_path: object) -> object:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD  # held here: a DDP model that is the last to hold it may wait for ever
    yield world
    gc.collect()
    dist.destroy_process_group()


def tower(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), *middle, nn.Linear(16, 1))


@pytest.mark.parametrize("moment", ["forward", "backward", "absorb", "score"])
def test_what_goes_wrong_switches_the_site_off(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Small()
    torch.manual_seed(0)
    plain = Small()
    expected = train(plain, batches(4))
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1, rows=16)
    broken = probe.watch("twice")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("mixed Tensor and DTensor")

    if moment == "forward":
        monkeypatch.setattr(broken, "_take", fail)
    elif moment == "backward":
        monkeypatch.setattr(
            "loka.probe.watch.take_rows",
            lambda x, c, i: fail() if x.shape[-1] == 1 else x.reshape(-1, x.shape[-1]).clone(),
        )
    elif moment == "absorb":
        assert broken.learned is not None
        monkeypatch.setattr(broken.learned, "see", fail)
    else:
        monkeypatch.setattr(broken.tally, "see", fail)
    assert train(model, batches(4), probe) == expected
    site = "last" if moment == "backward" else "twice"
    report = probe.evaluate(samples=2)
    if moment == "score":
        assert "mixed Tensor" in (report.site(site).unscored or "")
        assert report.site(site).off is None
        return
    assert "mixed Tensor and DTensor" in (report.site(site).off or "")
    assert any("switched off" in line for line in report.summary())
    assert report.site("first").off is None
    assert probe.watch("first").calls == 4


def test_a_broken_adapter_and_a_full_disk_do_not_stop_training(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(nn.Linear):
        pass

    monkeypatch.setitem(_REGISTERED, Odd, Adapter("linear", operands=lambda m, a, k: a[7]))  # type: ignore[arg-type,return-value]
    model = nn.Sequential(Odd(12, 16), nn.ReLU(), nn.Linear(16, 1))
    probe = Probe(model, every=1, snapshot_every=2, save_to="/dev/null/nowhere")
    train(model, batches(6), probe)
    assert "IndexError" in (probe.watch("0").off or "")
    assert probe.watch("2").calls == 6
    assert probe.notes
    assert probe.evaluate(samples=2).record.notes == probe.notes


@pytest.mark.parametrize("where", ["see_output", "settle"])
def test_an_output_that_cannot_be_looked_at_costs_the_score_and_nothing_else(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(probe._loss, where, fail)
    train(model, batches(3), probe)
    report = probe.evaluate(samples=2)
    assert any("no luck" in note for note in report.record.notes)
    assert probe.watch("first").calls == 3
    (verdict,) = [v for v in report.site("first").verdicts if v.gemm == "fprop"]
    assert verdict.safety != "safe"


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm"])
def test_a_parametrised_weight_is_not_touched(kind: str) -> None:
    """Reading a spectral norm's weight in training turns its power iteration by one: not bit-identical."""
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        inner = nn.Linear(16, 16)
        model = tower((spectral_norm if kind == "spectral_norm" else weight_norm)(inner), nn.ReLU())
        torch.manual_seed(1)
        probe = Probe(model, every=1, rows=16, snapshot_every=2) if attach else None
        losses = train(model, batches(6), probe)
        results.append((losses, {k: v.clone() for k, v in model.state_dict().items()}))
        if probe is not None:
            report = probe.evaluate(samples=2)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(v, results[1][1][k]) for k, v in results[0][1].items())
    site = report.site("2")
    assert "parametrised" in (site.kept or "")
    assert site.gemms == []
    assert site.flops_share > 0
    assert all(
        choice.backend == "high" for s in report.plan(min_speedup=None).sites if s.site == "2" for choice in s.choices
    )


def test_a_protected_site_is_marked_and_not_planned() -> None:
    model = tower(nn.Linear(16, 16), nn.ReLU())
    model[2].loka_protected = True  # what mods set
    probe = Probe(model, every=1)
    train(model, batches(2), probe)
    report = probe.evaluate(samples=2)
    assert "protected" in (report.site("2").kept or "")
    (plan,) = [s for s in report.plan(min_speedup=None, recipe="rowwise").sites if s.site == "2"]
    assert {choice.backend for choice in plan.choices} == {"high"}
    assert report.record.units == 2


def test_wrappers_leave_no_trace_in_the_names(group: object) -> None:
    torch._dynamo.reset()
    for wrap in (DistributedDataParallel, lambda m: torch.compile(m, backend="eager"), lambda m: m):
        torch.manual_seed(0)
        model = Small()
        for parameter in model.idle.parameters():
            parameter.requires_grad_(False)
        wrapped = wrap(model)
        probe = Probe(wrapped, every=1)
        assert probe.sites == ("first", "twice", "idle", "last")
        train(wrapped, batches(2), probe)
        assert probe.watch("first").calls == 2
        assert probe.watch("first").tally.harm("fprop", "rowwise") is not None
    torch._dynamo.reset()


def test_fsdp2_is_watched_like_a_plain_model(group: object) -> None:
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = tower(nn.Linear(16, 16), nn.ReLU())
        if sharded:
            fully_shard(model[2])  # a module of its own, whose hooks take the weight away before ours would see it
            fully_shard(model)
        probe = Probe(model, every=1, rows=64)
        losses = train(model, batches(3), probe)
        report = probe.evaluate(samples=3, sources=("rows",), judged_on=("rows",))
        assert not report.record.notes
        assert [s.off for s in report.record.sites] == [None] * 3
        found.append((losses, {(s.name, c.gemm, c.recipe): c.harm for s in report.record.sites for c in s.candidates}))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    for key, harm in found[0][1].items():
        other = found[1][1][key]
        assert harm is not None
        assert other is not None
        assert other.value == pytest.approx(harm.value, rel=0.2, abs=1e-7), (
            key
        )  # its weight is that of the forward, not of the update


def test_statistics_take_a_plain_tensor_only_where_they_must() -> None:
    statistics = Statistics(4, torch.device("cpu"))
    statistics.update(torch.randn(8, 4))
    assert statistics.count == 1


def test_a_loop_without_gradients_is_seen_forward_only() -> None:
    """The natural path for post-training quantisation."""
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1, rows=64)
    with torch.no_grad():
        for x, _ in batches(3):
            model(x)
            probe.step()
    report = probe.evaluate(samples=3)
    site = report.site("twice")
    assert site.gemms == ["fprop"]
    assert site.calls == 6
    assert all(c.mere is not None for c in site.candidates)
    (verdict,) = site.verdicts
    assert verdict.safety in ("not measured", "unsafe")
    assert "without gradients" in (site.unscored or "")


def test_training_replaces_what_was_seen_without_gradients() -> None:
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1, rows=64)
    with torch.no_grad():
        model(100 * batches(1)[0][0])
    probe.step()
    assert probe.watch("first").calls == 1
    train(model, batches(2), probe)
    with torch.no_grad():
        model(100 * batches(1)[0][0])
    probe.step()
    watch = probe.watch("first")
    assert watch.calls == 2
    assert float(watch.reservoir.x.abs().max()) < 10
    assert watch.gemms == ["fprop", "wgrad"]


class Mixture(nn.Module):
    """A GRU, an attention, a matrix of its own, a lazy linear and one that a user leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(12, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
        self.lazy = nn.LazyLinear(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.gru(x[:, None].expand(-1, 3, -1))
        h, _ = self.attention(h, h, h)
        out: Tensor = self.last(self.lazy(h.mean(1) @ self.matrix))
        return out


def test_what_cannot_be_seen_is_named_and_counted() -> None:
    torch.manual_seed(0)
    model = Mixture()
    probe = Probe(model, every=1)
    for x, y in batches(2):
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        probe.step()
    report = probe.evaluate(samples=2)
    unseen = {part.name: part for part in report.record.unseen}
    assert set(unseen) == {"gru", "attention", ""}
    assert unseen["gru"].flops == 6 * 48 * 3 * 48 * (12 + 16)
    assert unseen["attention"].flops == 6 * 48 * 3 * 4 * 16 * 16
    assert "fused" in unseen["gru"].reason
    shares = sum(site.flops_share for site in report.record.sites)
    assert 0 < shares < 0.05  # most of the model is out of sight, and the report does not call this 100 %
    assert {site.name for site in report.record.sites} == {"lazy", "last"}
    assert report.site("lazy").k == 16
    assert any("not looked at: " in line and "gru" in line for line in report.summary())


class Conv1D(nn.Module):
    """Like the one of transformers: a linear whose weight is [K, N]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


def test_a_transposed_linear_is_a_site_and_measured_like_the_plain_one() -> None:
    torch.manual_seed(0)
    odd = tower(Conv1D(16, 16), nn.ReLU())
    plain = tower(nn.Linear(16, 16), nn.ReLU())
    with torch.no_grad():
        plain[2].weight.copy_(odd[2].weight.T)
        plain[2].bias.copy_(odd[2].bias)
    harms = []
    for model in (odd, plain):
        probe = Probe(model, every=1, rows=64)
        x, y = batches(1)[0]
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        probe.step()
        found = probe.watch("2").tally.harm("fprop", "rowwise")
        assert found is not None
        harms.append(found[0].value)
        kept: Report = probe.evaluate(samples=2)
        assert (kept.site("2").kept is None) == (model is plain)
    assert harms[0] == pytest.approx(harms[1], rel=1e-4)
