import pytest
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


class Fed(nn.Module):
    """Linears a to d, each fed by a norm with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return [linear(torch.relu(self.norm(x))) for linear in (self.a, self.b, self.c, self.d)]


def suggested(*sites):
    return {s.mod: s.sites for s in mods.suggest(report(*sites), Fed(), example=torch.randn(2, 4))}


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
    assert suggested(site("a", suggested="block_norm: normalize the input")) == {"block_norm": ("a",)}


def test_every_suggestion_names_a_mod_that_exists():
    found = suggested(
        site("a", outlier_channels=1, mean=9.0, non_finite=2),
        site("b", n=2),
        site("c", k=3),
        site("d", safety="safe", speed="slow"),
    )
    assert set(found) <= set(mods.names())


def test_the_mod_that_concerns_the_most_work_comes_first():
    found = mods.suggest(
        report(site("a", share=0.1, mean=9.0), site("b", share=0.8, outlier_channels=1)),
        Fed(),
        example=torch.randn(2, 4),
    )
    assert [(s.mod, s.sites) for s in found] == [("block_norm", ("b",)), ("no_bias", ("a",))]
    assert str(found[0]) == "block_norm: outliers in the input: a norm in fixed blocks bounds it (1 site: b)"


class Raw(nn.Module):
    """A raw column beside an embedding; a linear behind a linear; one behind a batch norm, and one behind a block norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.batch, self.block = nn.Embedding(5, 4), nn.BatchNorm1d(8), BlockNorm(8)
        self.raw, self.behind, self.plain = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last, self.blocked = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ids = nn.Linear(4, 8)
        self.unused = nn.Linear(4, 4)

    def forward(self, dense, ids):
        table = self.table(ids)
        x = torch.relu(self.raw(torch.cat([dense, table], -1)))
        x = self.last(self.plain(self.batch(self.behind(x))))
        return self.blocked(self.block(x)) + self.ids(table)


def test_suggestions_fit_what_feeds_the_site():
    names = ["raw", "behind", "plain", "last", "blocked", "ids", "unused"]
    found = mods.suggest(
        report(*(site(name, mean=9.0, outlier_channels=2) for name in names)),
        Raw(),
        example=(torch.randn(3, 2), torch.randint(5, (3,))),
    )
    assert {s.mod: s.sites for s in found} == {"no_bias": ("behind", "plain")}


@pytest.mark.parametrize("mod", ["no_bias: drop the bias", "block_norm: normalise"])
def test_the_probes_own_advice_is_judged_too(mod):
    found = report(site("raw", suggested=mod))
    assert mods.suggest(found, Raw(), example=(torch.randn(3, 2), torch.randint(5, (3,)))) == []
    assert mods.suggest(found) == []
    assert mods.unjudged(found) == {mod.partition(":")[0]: ("raw",)}


def test_a_model_that_cannot_run_the_example_is_refused():
    with pytest.raises(
        ValueError, match="what feeds a site is read off a run of the model: the model failed on the example"
    ):
        mods.suggest(report(site("a", mean=9.0)), Fed(), example=torch.randn(2, 3))


def test_a_real_probe_of_rows_of_all_sizes_asks_for_block_norm_until_it_is_there(monkeypatch):
    from loka.mods import block_norm
    from loka.probe import Probe

    # the norm of this test normalizes nothing, and is replaced all the same: only a place for the suggestion
    monkeypatch.setattr(block_norm, "refuse_formula", lambda norm, width: None)

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
    model, x = nn.Sequential(Spread(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 32)
    found = {s.mod: s.sites for s in mods.suggest(probe(model), model, example=x)}
    assert "1" in found["block_norm"]
    mods.apply(model, "block_norm", example=x)
    assert isinstance(model[0], BlockNorm)
    assert "1" not in {s.mod: s.sites for s in mods.suggest(probe(model), model, example=x)}.get("block_norm", ())


class Spread(nn.LayerNorm):
    """A norm that leaves rows as large as they are: nothing but its place says that it is one."""

    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, x):
        return x * self.weight + self.bias
