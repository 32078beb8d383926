"""Linears inside FP8 chains are sites like any other: Probe sees what they multiply, judges how the chain runs them, and does not change the run by a bit."""

import copy
import pickle

import pytest
import torch
from tests.lowp.test_interaction import make_input, make_layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka import Guard
from loka.lowp import GuardConfig, chain_of, chains_of
from loka.lowp.chain_trace import Trace
from loka.lowp.interaction import interactions_of, place_interaction
from loka.nn import BlockNorm
from loka.placing import convert, plan_everything, revert
from loka.probe import Probe, Report
from loka.records import Candidate

WIDTH = 64
KINDS = ("delayed", "bounded", "tensor gradients", "dropping")


class Tower(nn.Module):
    """Three linears in a chain, with a norm of a kind in it, and a prediction layer."""

    def __init__(self, kind: str = "delayed", *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = (BlockNorm(128), BlockNorm(96)) if kind == "bounded" else (nn.Identity(), nn.LayerNorm(96))
        acts: list[nn.Module] = [nn.ReLU(), nn.SiLU()]
        if kind == "dropping":
            acts = [nn.Sequential(act, nn.Dropout(0.3)) for act in acts]
        self.tower = nn.Sequential(
            nn.Linear(WIDTH, 128), norms[0], acts[0], nn.Linear(128, 96), norms[1], acts[1], nn.Linear(96, WIDTH)
        )
        self.last = nn.Linear(WIDTH, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.tower, x, use_reentrant=False) if self.checkpointed else self.tower(x))


LINKS = ("tower.0", "tower.3", "tower.6")


def low(kind: str = "delayed", **options: bool) -> Tower:
    model = Tower(kind, **options)
    gradient = "tensor" if kind == "tensor gradients" else None
    convert(model, plan_everything(Tower(kind), torch.randn(4, WIDTH), gradient=gradient), backend="reference")
    return model


def batches(count: int, *, heavy: bool = False, rows: int = 128) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(rows, WIDTH, generator=g) for _ in range(count)]
    ys = [(x[:, :1] > 0).float() for x in xs]
    return [(x * torch.exp(8 * torch.randn(rows, 1, generator=g)) if heavy else x, y) for x, y in zip(xs, ys, strict=True)]  # fmt: skip


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], probe: Probe | None = None) -> list[Tensor]:
    torch.manual_seed(2)  # of dropout
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
        if probe is not None:
            probe.step()
    return [p.detach().clone() for p in model.parameters()]


def own(report: Report, site: str, gemm: str = "fprop") -> Candidate:
    (found,) = [c for c in report.site(site).candidates if c.recipe == "chain" and c.gemm == gemm]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_multiplies_what_the_chain_multiplied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = low(kind)
    train(model, batches(2))  # scales are known
    ((_, chain),) = chains_of(model)
    model.zero_grad()
    x, target = batches(1)[0]
    seed = torch.tensor([5]) if kind == "dropping" else None
    monkeypatch.setattr(chain, "draw_seed", lambda layout, device: seed)
    y = model.tower(x.requires_grad_())
    y.retain_grad()
    trace = Trace(chain, x, x.dtype, None, graded=True, seed=seed)
    nn.functional.binary_cross_entropy_with_logits(model.last(y), target).backward()
    trace.see_gradient(y.grad)
    assert trace.finish()
    for link, linear in zip(trace.links, chain.linears, strict=True):
        # every operand of every GEMM, by what the chain made of it: exact products of FP8 numbers but for the order of the sum
        torch.testing.assert_close(link.dy_low.dequantize().T @ link.x_low.dequantize(), linear.weight.grad, rtol=1e-4, atol=1e-7)  # fmt: skip
        for plain, rounded in ((link.x, link.x_low), (link.dy, link.dy_low)):
            error = (plain - rounded.dequantize()).norm() / plain.norm()
            assert 0.01 < error < 0.06  # half a step of E4M3, and the FP8 z that backward reads
    first, last = trace.links[0], trace.links[-1]
    torch.testing.assert_close(first.dy_low.dequantize() @ first.w_low_t.dequantize().T, x.grad, rtol=1e-4, atol=1e-7)
    made = last.x_low.dequantize() @ last.w_low.dequantize().T + model.tower[6].bias.detach()
    torch.testing.assert_close(made, y.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_links_are_sites_and_the_run_does_not_change(kind: str) -> None:
    model, twin = low(kind), low(kind)
    probe = Probe(model, every=1)
    assert probe.sites == (*LINKS, "last")
    assert all(torch.equal(a, b) for a, b in zip(train(model, batches(5), probe), train(twin, batches(5)), strict=True))
    states = [[s.state() for s in chain.remembered] for m in (model, twin) for _, chain in chains_of(m)]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*states, strict=True) for key in a)
    report = probe.evaluate(samples=2, recipes=("tensorwise",))
    assert not report.record.unseen
    for site in LINKS:
        found = report.site(site)
        assert found.off is None
        assert found.unscored is None
        assert found.gemms == (["fprop", "wgrad"] if site == LINKS[0] else ["fprop", "dgrad", "wgrad"])
        for gemm in found.gemms:
            candidate = own(report, site, gemm)
            assert 0.01 < candidate.relative_l2.value < 0.1  # as E4M3 has it
            assert candidate.saturated == 0
            assert candidate.harm is not None
        assert all(v.reason.startswith("in the chain tower.0: ") for v in found.verdicts)
    expected = "e4m3:tensor:static" if kind == "bounded" else "e4m3:tensor:delayed"
    assert [own(report, site).a for site in LINKS] == ["e4m3:tensor", expected, expected]


def test_rows_of_very_different_size_are_noticed_by_name() -> None:
    model = low()
    probe = Probe(model, every=1)
    train(model, batches(5, heavy=True), probe)
    report = probe.evaluate(samples=2, recipes=("tensorwise", "rowwise"))
    candidate = own(report, "tower.0")
    assert candidate.mere.value > 0.8
    assert candidate.underflowed > 0.5
    verdict = next(v for v in report.site("tower.0").verdicts if v.gemm == "fprop")
    assert verdict.safety == "unsafe"
    assert "of an operand underflows to zero" in verdict.reason
    line = next(line for line in report.table().splitlines() if line.startswith("tower.0 "))
    assert "unsafe" in line


def test_what_exceeds_a_delayed_scale_is_noticed_where_it_happens() -> None:
    model = low()
    probe = Probe(model, every=1)
    data = batches(5)
    data[4] = (100 * data[4][0], data[4][1])  # the scales are of the steps before
    train(model, data, probe)
    report = probe.evaluate(samples=2, recipes=("tensorwise",))
    assert own(report, "tower.0").saturated == 0  # its scale comes from x itself
    assert own(report, "tower.3").saturated > 0.01
    assert own(report, "tower.6").saturated == 0  # behind a LayerNorm


def test_compiled_links_are_seen() -> None:
    torch._dynamo.reset()
    model, twin = low(), low()
    train(model, batches(2))
    train(twin, batches(2))
    probe = Probe(model, every=2)
    after = train(torch.compile(model, backend="aot_eager"), batches(5), probe)
    for a, b in zip(after, train(torch.compile(twin, backend="aot_eager"), batches(5)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)  # two graphs round apart
    report = probe.evaluate(samples=2, recipes=("tensorwise",))
    for site in LINKS:
        assert report.site(site).off is None
        assert report.site(site).calls == 3
        assert 0.01 < own(report, site, "wgrad").relative_l2.value < 0.1


def test_checkpointing_counts_a_call_once() -> None:
    model, plain = low(checkpointed=True), low()
    probes = [Probe(m, every=1) for m in (model, plain)]
    for m, probe in zip((model, plain), probes, strict=True):
        train(m, batches(3), probe)
    for site in LINKS:
        one, other = (probe.watch(site) for probe in probes)
        assert one.calls == other.calls == 3
        assert torch.equal(one.reservoir.dy, other.reservoir.dy)


def test_a_look_that_fails_switches_the_links_off_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = low(), low()
    expected = train(twin, batches(3))
    monkeypatch.setattr(Trace, "see_gradient", lambda *_: 1 / 0)
    probe = Probe(model, every=1)
    assert all(torch.equal(a, b) for a, b in zip(train(model, batches(3), probe), expected, strict=True))
    assert all("ZeroDivisionError" in probe.watch(site).off for site in LINKS)
    assert probe.watch("last").off is None


def test_a_probe_stays_while_chains_come_split_and_go() -> None:
    model = Tower()
    probe = Probe(model, every=1)
    train(model, batches(1), probe)
    convert(model, plan_everything(Tower(), torch.randn(4, WIDTH)), backend="reference")
    train(model, batches(1), probe)
    guard = Guard(model, GuardConfig(every=1), decide=lambda site: object())
    guard.report_drift("tower.3", "for the test")
    guard.begin_step()
    train(model, batches(1), probe)
    assert [event.action for event in guard.check()] == ["rebound"]
    assert chain_of(model.tower[3]) is None
    train(model, batches(1), probe)
    assert revert(model) == 2
    train(model, batches(1), probe)
    assert [probe.watch(site).calls for site in probe.sites] == [5] * 4
    assert all(probe.watch(site).off is None for site in probe.sites)
    probe.detach()
    assert not any("loka_tap" in vars(module) for module in model.modules())


@pytest.mark.parametrize("compiled", [False, True])
def test_two_probes_see_the_same_chain_each_as_if_alone(compiled: bool) -> None:
    def run(count: int) -> tuple[list[Tensor], list[Probe]]:
        model = low()
        train(model, batches(2) if compiled else [])  # so that scales are known: a graph less to trace
        probes = [Probe(model, every=1) for _ in range(count)]
        runner = torch.compile(model, backend="eager") if compiled else model
        trained = []
        for batch in batches(4):
            trained = train(runner, [batch])
            for probe in probes:
                probe.step()
        return trained, probes

    plain, (alone,) = run(1)
    trained, (first, second) = run(2)
    assert all(torch.equal(a, b) for a, b in zip(plain, trained, strict=True))
    expected = alone.evaluate(samples=2, recipes=("tensorwise",))
    for probe in (first, second):
        report = probe.evaluate(samples=2, recipes=("tensorwise",))
        assert {site: own(report, site, "wgrad") for site in LINKS} == {site: own(expected, site, "wgrad") for site in LINKS}  # fmt: skip
    calls = first.model.tower[0].loka_tap
    assert len(calls.taps) == 2
    first.detach()
    assert len(calls.taps) == 2, "the others are left as they are"
    assert first.model.tower[0].loka_tap is calls.taps[1]
    train(first.model, batches(2), second)
    second.detach()
    assert "loka_tap" not in vars(first.model.tower[0])


def test_what_was_seen_survives_a_restart_and_adds_up_over_ranks() -> None:
    model = low()
    probe = Probe(model, every=1)
    train(model, batches(3), probe)
    again = Probe(model, every=1)
    again.load_state_dict(probe.state_dict())
    settings = {"samples": 2, "recipes": ("tensorwise",)}
    assert own(again.evaluate(**settings), "tower.3") == own(probe.evaluate(**settings), "tower.3")
    again.merge(probe.state_dict())
    assert again.watch("tower.3").own.looks == 2 * probe.watch("tower.3").own.looks


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model = low()
    probe = Probe(model, every=1)
    copied = copy.deepcopy(model)
    assert copied.tower[0].__dict__["loka_tap"] is None
    probe.detach()
    train(copied, batches(1))
    assert probe.watch("tower.0").calls == 0
    pickle.dumps(model)


def test_serving_without_gradients_shows_inputs_alone() -> None:
    model = low()
    train(model, batches(2))
    probe = Probe(model.eval(), every=1)
    with torch.no_grad():
        for x, _ in batches(2):
            model(x)
            probe.step()
    report = probe.evaluate(samples=2, recipes=("tensorwise",))
    assert report.site("tower.3").gemms == ["fprop"]
    assert 0.01 < own(report, "tower.3").relative_l2.value < 0.1


def test_a_chain_inside_a_fused_interaction_is_seen() -> None:
    layer = make_layer()
    place_interaction(layer)
    twin = copy.deepcopy(layer)
    assert list(interactions_of(twin))
    probe = Probe(layer, every=1)
    x, goal = make_input(64, 32), torch.randn(64, 32, 16)
    for one in (layer, twin):
        (one(x) * goal).sum().backward()
    probe.step()
    for (name, a), b in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for name in ("fmb.mlp.layers.0.linear", "fmb.mlp.last"):
        watch = probe.watch(name)
        assert watch.off is None
        assert watch.calls == 1
        grad = layer.get_submodule(name).weight.grad
        seen = watch.reservoir.dy.float().T @ watch.reservoir.x.float()
        assert (seen - grad).norm() < 0.1 * grad.norm()
