"""The probe sees what the GEMMs are given, changes nothing, and finds a planted difficulty."""

import math

import pytest
import torch
from torch import nn

from loka.formats import Spec, fake_quantize, mere
from loka.probe import Probe, Report

from .small import Small, batches, train


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


def test_training_is_bit_identical_with_the_probe() -> None:
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Small()
        probe = Probe(model, every=2, rows=16) if attach else None
        losses = train(model, batches(8), probe)
        noise = torch.rand(3)  # the global generator must not have been touched either
        results.append((losses, noise, [p.detach().clone() for p in model.parameters()]))
    (plain, noise, weights), (probed, other_noise, other_weights) = results
    assert plain == probed
    assert torch.equal(noise, other_noise)
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_it_sees_the_operands_themselves(small: Small) -> None:
    probe = Probe(small, every=1, rows=64)
    x, y = batches(1)[0]
    seen: dict[str, torch.Tensor] = {}
    small.last.register_full_backward_hook(lambda m, gi, go: seen.update(dy=go[0].clone()))
    nn.functional.binary_cross_entropy_with_logits(small(x), y).backward()
    probe.step()
    first, last = probe._watches["first"], probe._watches["last"]
    assert torch.equal(first.reservoir.x, x)
    assert last.reservoir.dy is not None
    assert torch.equal(last.reservoir.dy, seen["dy"])


def test_an_in_place_activation_does_not_reach_the_sample(small: Small) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    x = batches(1)[0][0]
    probe = Probe(model, every=1)
    model(x).sum().backward()
    probe.step()
    assert torch.equal(probe._watches["0"].reservoir.x, x)
    dy = probe._watches["0"].reservoir.dy
    assert dy is not None
    pre = model[0](x)
    assert torch.equal(dy, torch.where(pre > 0, model[2].weight.expand_as(pre), torch.zeros(())))


def test_only_every_nth_step_is_sampled(small: Small) -> None:
    probe = Probe(small, every=3)
    train(small, batches(7), probe)
    assert probe.sampled_steps == 3
    assert probe._watches["first"].calls == 3
    assert probe._watches["twice"].calls == 6


def test_validation_is_not_recorded(small: Small) -> None:
    probe = Probe(small, every=1)
    with torch.no_grad():
        small(batches(1)[0][0])
    assert probe._watches["first"].calls == 0


def test_detached_it_sees_nothing_more(small: Small) -> None:
    probe = Probe(small, every=1)
    probe.detach()
    train(small, batches(2), probe)
    assert probe._watches["first"].calls == 0
    assert not probe.sampling
    assert not small.first._forward_hooks


def test_gemms_are_those_that_happen(small: Small) -> None:
    probe = Probe(small, every=1)
    small.last.weight.requires_grad_(False)
    train(small, batches(1), probe)
    report = probe.evaluate(samples=2).record
    gemms = {site.name: site.gemms for site in report.sites}
    assert gemms == {
        "first": ["fprop", "wgrad"],  # its input needs no gradient
        "twice": ["fprop", "dgrad", "wgrad"],
        "idle": [],
        "last": ["fprop", "dgrad"],  # its weight is frozen
    }


def test_a_site_never_called_says_so(small: Small) -> None:
    probe = Probe(small, every=1)
    train(small, batches(1), probe)
    (site,) = [s for s in probe.evaluate(samples=2).record.sites if s.name == "idle"]
    assert site.verdicts[0].safety == "not measured"
    assert "never called" in site.verdicts[0].reason
    assert site.flops_share == 0


def test_flops_shares_are_of_the_sites_until_the_model_is_counted(small: Small) -> None:
    probe = Probe(small, every=1)
    train(small, batches(2), probe)
    report = probe.evaluate(samples=2).record
    assert report.flops_of == "sites"
    assert math.isclose(sum(site.flops_share for site in report.sites), 1)

    x, y = batches(1)[0]
    total = probe.count_flops(lambda: nn.functional.binary_cross_entropy_with_logits(small(x), y).backward())
    rows = x.shape[0]
    assert total == 2 * rows * (12 * 32 * 2 + 2 * 32 * 32 * 3 + 32 * 3)
    counted = probe.evaluate(samples=2).record
    assert counted.flops_of == "model"
    assert math.isclose(sum(site.flops_share for site in counted.sites), 1)


def test_errors_equal_a_direct_computation(small: Small) -> None:
    probe = Probe(small, every=1, rows=64)
    x, y = batches(1)[0]
    nn.functional.binary_cross_entropy_with_logits(small(x), y).backward()
    report = probe.evaluate(["rowwise"], samples=3, sources=["rows"], judged_on=["rows"])
    spec = Spec.parse("e4m3:row")
    weight = small.first.weight.detach()
    out, ref = fake_quantize(x, spec) @ fake_quantize(weight, spec).T, x @ weight.T
    expected = sum(mere(out[[row]], ref[[row]]) for row in range(len(x))) / len(x)
    found = report.best("first", "fprop")
    assert found is not None
    assert found.mere is not None
    assert found.mere.value == pytest.approx(expected, rel=1e-5)
    assert found.mere.low <= found.mere.value <= found.mere.high
    assert found.microseconds is None
    assert found.speedup is None


def test_a_planted_outlier_makes_tensorwise_unsafe_but_not_rowwise() -> None:
    """Row scales spread over many octaves inside one tensor: one scale cannot serve them, one per row can."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    probe = Probe(model, every=1, rows=256)
    scales = torch.exp(torch.randn(256, 1) * 5)
    x = torch.randn(256, 64) * scales
    (model(x) / scales).sum().backward()
    report = probe.evaluate(["tensorwise", "rowwise"], samples=5)
    errors = {c.recipe: c.mere for c in report.record.sites[0].candidates if c.gemm == "fprop"}
    assert errors["tensorwise"] is not None
    assert errors["rowwise"] is not None
    assert errors["rowwise"].high < 0.2 < errors["tensorwise"].low
    plan = report.plan(min_speedup=None)
    (choice,) = [c for c in plan.sites[0].choices if c.gemm == "fprop"]
    assert choice.a == "e4m3:row"
    assert any("tensorwise" in refusal for refusal in choice.refusals)


def test_unsafe_names_the_cause() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    probe = Probe(model, every=1, rows=256)
    x = torch.randn(256, 64) * 1e-6
    x[:, 5] = 1000.0
    model[0].weight.data[:, 5] = 0  # the outlier says nothing, and hides everything that does
    model(x).sum().backward()
    report = probe.evaluate(["rowwise"], samples=3)
    (verdict,) = [v for v in report.record.sites[0].verdicts if v.gemm == "fprop"]
    assert verdict.safety == "unsafe"
    assert "1 outlier channel in the input" in verdict.reason
    assert "underflows" in verdict.reason
    assert verdict.suggested_mod is not None
    assert "unsafe" in report.table()


def test_nan_batches_are_counted_not_hidden(small: Small) -> None:
    probe = Probe(small, every=1)
    x, _ = batches(1)[0]
    x[0, 0] = torch.nan
    small(x).sum().backward()
    report = probe.evaluate(["rowwise"], samples=2)
    site = report.site("first")
    assert {s.role: s.non_finite for s in site.stats}["x"] == 1
    assert all(c.refusal and "not finite" in c.refusal for c in site.candidates if c.gemm == "fprop")
    assert site.verdicts[0].safety == "not measured"


def test_empty_batches_are_fine(small: Small) -> None:
    probe = Probe(small, every=1)
    small(torch.zeros(0, 12)).sum().backward()
    probe.step()
    assert probe.evaluate(samples=1).record.sites[0].m == 0


def test_filter_chooses_the_sites(small: Small) -> None:
    assert Probe(small, lambda module, name: name != "idle").sites == ("first", "twice", "last")
    with pytest.raises(ValueError, match="nothing to probe"):
        Probe(small, lambda module, name: False)


@pytest.mark.parametrize("options", [{"every": 0}, {"rows": 1}])
def test_nonsense_is_refused(small: Small, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        Probe(small, **options)


def test_state_survives_and_continues(small: Small, tmp_path: object) -> None:
    probe = Probe(small, every=1, rows=32)
    train(small, batches(3), probe)
    again = Probe(small, every=1, rows=32)
    again.load_state_dict(probe.state_dict())
    assert again.evaluate(samples=2).record.sites == probe.evaluate(samples=2).record.sites
    other = Probe(small, lambda module, name: name == "last")
    with pytest.raises(ValueError, match="other sites"):
        other.load_state_dict(probe.state_dict())


def test_a_shared_module_is_one_site() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    probe = Probe(model, every=1)
    model(torch.randn(4, 8)).sum().backward()
    assert probe.sites == ("0",)
    assert probe._watches["0"].calls == 2


def test_report_saves_and_loads(small: Small, tmp_path: object) -> None:
    probe = Probe(small, every=1)
    train(small, batches(2), probe)
    report = probe.evaluate(samples=2)
    path = f"{tmp_path}/probe.json"
    report.save(path)
    assert Report.load(path).record == report.record
    with pytest.raises(ValueError, match="no site 'nowhere'"):
        report.site("nowhere")


def test_a_compiled_model_is_compiled_once() -> None:
    """Sampled steps run eagerly; the graph of the others knows nothing of the step's number."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    probe = Probe(model, every=4, rows=16)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for x, _ in batches(12):
        with torch.compiler.set_stance("force_eager" if probe.sampling else "default"):
            compiled(x).sum().backward()
        probe.step()
    assert probe.sampled_steps == 3
    assert probe._watches["0"].calls == 3
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_plan_can_choose_from_what_the_device_has(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without backends: emulation on a CPU, kernels on a GPU."""
    from loka.probe import probe as home

    assert home.choose_backends("cpu") == ("reference",)
    assert home.choose_backends("cuda:1") == ("torch", "triton")
    probe = Probe(small, every=1)
    train(small, batches(2), probe)
    asked: list[torch.device] = []
    monkeypatch.setattr(home, "choose_backends", lambda device: (asked.append(device), ("torch",))[1])
    found = probe.evaluate(["rowwise"], samples=2)
    assert asked == [next(small.parameters()).device]
    assert {c.backend for site in found.record.sites for c in site.candidates if c.recipe == "rowwise"} == {"torch"}
    found = probe.evaluate(["rowwise"], samples=2, backends=("reference",))
    assert {c.backend for site in found.record.sites for c in site.candidates} == {"reference"}


@pytest.mark.gpu
def test_the_five_lines_of_the_readme_run_kernels_on_a_gpu() -> None:
    import loka

    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
    probe = Probe(model, every=1)
    model(torch.randn(256, 512, device="cuda")).square().mean().backward()
    probe.step()
    plan = probe.evaluate(samples=4).plan(min_speedup=None)
    chosen = {c.backend for site in plan.sites for c in site.choices if c.quantized}
    assert chosen
    assert chosen <= {"torch", "triton"}
    probe.detach()
    loka.convert(model, plan)
    model(torch.randn(256, 512, device="cuda")).sum().backward()
