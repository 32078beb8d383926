import torch
from torch import nn

from loka import mods
from loka.nn import BlockNorm
from loka.records import GemmVerdict, ProbeReport, Site, TensorStats, capture_environment


def stats(**changes):
    base = {"role": "x", "elements": 10, "non_finite": 0, "mean": 0.0, "std": 1.0, "absmax": 3.0, "abs_p99": 2.0, "abs_p999": 2.5,
            "kurtosis": 0.0, "zero_fraction": 0.0, "outlier_channels": 0, "histogram_first": 0, "histogram": []}  # fmt: skip
    return TensorStats(**{**base, **changes})


def site(name, *, safety="unsafe", speed="not measured", n=64, k=64, share=0.1, suggested=None, **changes):
    verdict = GemmVerdict(gemm="fprop", safety=safety, speed=speed, reason="because", suggested_mod=suggested)
    return Site(name=name, type="Linear", m=8, k=k, n=n, calls=1, flops_share=share, gemms=["fprop"], stats=[stats(**changes)],
                candidates=[], verdicts=[verdict])  # fmt: skip


def report(*sites):
    return ProbeReport(model="m", steps=1, sampled_steps=1, max_mere=0.2, max_gradient_error=0.1, flops_of="sites", rows=8, formats=[],
                       sites=list(sites), environment=capture_environment(command="test"))  # fmt: skip


def suggested(*sites):
    return {s.mod: s.sites for s in mods.suggest(report(*sites))}


def test_each_finding_speaks_for_its_mod():
    assert suggested(site("a", outlier_channels=3)) == {"block_norm": ("a",)}
    assert suggested(site("a", kurtosis=400.0)) == {"block_norm": ("a",)}
    assert suggested(site("a", mean=-5.0)) == {"no_bias": ("a",)}
    assert suggested(site("a", non_finite=1)) == {"hard_swish": ("a",)}
    assert suggested(site("a", n=1)) == {"protect_intermediates": ("a",)}
    assert suggested(site("a", k=50)) == {"align_shapes": ("a",)}
    assert suggested(site("a", safety="safe", speed="slow")) == {"fuse": ("a",)}
    assert suggested(site("a", safety="safe", outlier_channels=3)) == {}
    assert suggested(site("a", suggested="keep the prediction layer in high precision")) == {
        "protect_intermediates": ("a",)
    }
    assert suggested(site("a", suggested="block_norm: normalise the input")) == {"block_norm": ("a",)}


def test_every_suggestion_names_a_mod_that_exists():
    found = suggested(
        site("a", outlier_channels=1, mean=9.0, non_finite=2),
        site("b", n=2),
        site("c", k=3),
        site("d", safety="safe", speed="slow"),
    )
    assert set(found) <= set(mods.names())


def test_the_mod_that_concerns_the_most_work_comes_first():
    found = mods.suggest(report(site("small", share=0.1, mean=9.0), site("large", share=0.8, outlier_channels=1)))
    assert [(s.mod, s.sites) for s in found] == [("block_norm", ("large",)), ("no_bias", ("small",))]
    assert str(found[0]) == "block_norm: outliers in the input: a norm in fixed blocks bounds it (1 sites: large)"


def test_a_real_probe_of_rows_of_all_sizes_asks_for_block_norm_until_it_is_there():
    from loka.probe import Probe

    def probe(model):
        watch = Probe(model, every=1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            x = torch.randn(256, 32, generator=generator) * torch.exp(6 * torch.randn(256, 1, generator=generator))
            x[:, 3] *= 1000
            model(x).square().mean().backward()
            watch.step()
        watch.detach()
        return watch.evaluate(["tensorwise"], samples=10)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
    found = {s.mod: s.sites for s in mods.suggest(probe(model))}
    assert "1" in found["block_norm"]
    model[0] = BlockNorm(32)
    assert "1" not in {s.mod: s.sites for s in mods.suggest(probe(model))}.get("block_norm", ())
