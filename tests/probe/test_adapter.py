"""Sites that are not linears: their operands, seen as one GEMM, reproduce what the module computed."""

import pytest
import torch
from torch import Tensor, nn

from loka.nn import DotInteraction, DotProductAttention, FactorizationMachine, FeatureMix, GroupedLinear
from loka.probe import Probe
from loka.probe.adapter import KINDS, Adapter, find_adapter, register


class Holder(nn.Module):
    """One module under a name."""

    def __init__(self, site: nn.Module) -> None:
        super().__init__()
        self.site = site

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.site(*inputs)
        return out


def look(site: nn.Module, *inputs: Tensor, **options: object) -> Probe:
    model = Holder(site)
    probe = Probe(model, every=1, rows=4096, kinds=KINDS, **options)
    out = model(*inputs)
    (out * torch.randn_like(out)).sum().backward()
    probe.step()
    return probe


def test_feature_mix_is_a_gemm_over_columns() -> None:
    torch.manual_seed(0)
    site, x = FeatureMix(6, (4, 3)), torch.randn(5, 6, 8, requires_grad=True)
    watch = look(site, x).watch("site")
    assert (watch.largest, watch.k, watch.n) == (5 * 8, 6, 7)
    rows, weight = watch.reservoir.x, watch.draw("w", "rows", 1, torch.Generator())
    expected = site(x).detach().transpose(1, 2).reshape(-1, 7)
    torch.testing.assert_close(rows @ weight.T, expected)
    assert watch.reservoir.dy is not None
    torch.testing.assert_close(watch.reservoir.dy.T @ rows, site.weight.grad)  # wgrad, from the rows alone
    assert watch.gemms == ["fprop", "dgrad", "wgrad"]


def test_a_sample_of_columns_keeps_x_and_dy_together() -> None:
    torch.manual_seed(0)
    model = Holder(FeatureMix(6, 4))
    probe = Probe(model, every=1, rows=10, kinds=("mixed",))
    x = torch.randn(5, 6, 8)
    (model(x) * x[:, :4]).sum().backward()  # so that dy = the first four entries of x
    probe.step()
    reservoir = probe.watch("site").reservoir
    assert reservoir.kept == 10
    assert reservoir.dy is not None
    assert torch.equal(reservoir.dy, reservoir.x[:, :4])


def test_grouped_linear_counts_rows_once_and_knows_its_experts() -> None:
    torch.manual_seed(0)
    site = GroupedLinear(3, 8, 16)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    x = torch.randn(10, 8, requires_grad=True)
    probe = look(site, x, ends)
    (record,) = probe.evaluate(["rowwise"], samples=2).record.sites
    assert (record.m, record.k, record.n, record.groups) == (10, 8, 16, 3)
    assert record.gemms == ["fprop", "dgrad", "wgrad"]
    watch = probe.watch("site")
    assert (watch.largest, watch.k, watch.n, watch.groups) == (10, 8, 16, 3)
    drawn = watch.draw("w", "rows", 1, torch.Generator().manual_seed(0))
    assert any(torch.equal(drawn, expert) for expert in site.weight)
    (weight,) = [s for s in watch.describe() if s.role == "w"]
    assert weight.elements == 3 * 8 * 16
    assert watch.draw("w", "gaussian", 1, torch.Generator()).shape == (16, 8)


def test_products_of_activations_learn_their_shape_when_called() -> None:
    torch.manual_seed(0)
    x, mixtures = torch.randn(5, 6, 8, requires_grad=True), torch.randn(5, 3, 8, requires_grad=True)
    watch = look(FactorizationMachine(), x, mixtures).watch("site")
    assert (watch.largest, watch.k, watch.n) == (30, 8, 3)
    assert watch.gemms == ["fprop", "dgrad", "wgrad"]
    drawn = watch.draw("w", "rows", 1, torch.Generator())
    assert any(torch.equal(drawn, example) for example in mixtures)
    assert watch.draw("w", "copula", 1, torch.Generator()).shape == (3, 8)


@pytest.mark.parametrize("site", [DotInteraction(6), DotProductAttention()])
def test_outputs_that_are_not_the_product_have_no_gradient_gemms(site: nn.Module) -> None:
    torch.manual_seed(0)
    shape = (5, 6, 8) if isinstance(site, DotInteraction) else (5, 2, 6, 8)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(1 if len(shape) == 3 else 3)]
    watch = look(site, *inputs).watch("site")
    assert (watch.k, watch.n) == (8, 6)
    assert watch.gemms == ["fprop"]


def test_lookups_have_statistics_and_no_gemm() -> None:
    torch.manual_seed(0)
    site = nn.Embedding(50, 4)
    probe = look(site, torch.randint(50, (7, 3)))
    watch = probe.watch("site")
    assert (watch.k, watch.n, watch.gemms) == (50, 4, [])
    stats = {s.role: s for s in watch.describe()}
    assert stats["w"].elements == 200
    assert stats["x"].elements == stats["dy"].elements == 7 * 3 * 4
    bag = look(nn.EmbeddingBag(50, 4), torch.randint(50, (7, 3))).watch("site")
    assert {s.role for s in bag.describe()} == {"w", "x", "dy"}


def test_shapes_learned_late_survive_saving() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, 6, 8, requires_grad=True), torch.randn(5, 3, 8)]
    probe = look(FactorizationMachine(), *inputs)
    again = Probe(Holder(FactorizationMachine()), every=1, rows=4096, kinds=("batched",))
    again.load_state_dict(probe.state_dict())
    assert (again.watch("site").k, again.watch("site").n) == (8, 3)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    first, second = (
        p.watch("site").draw("w", "gaussian", 1, g) for p, g in zip((probe, again), generators, strict=True)
    )
    assert torch.equal(first, second)


def test_a_whole_model_trains_the_same_with_every_kind_of_site() -> None:
    from loka.models import build, configure

    size, results = configure("wukong", "tiny"), []
    for attach in (False, True):
        torch.manual_seed(0)
        model = build("wukong", "tiny")
        probe = Probe(model, every=1, rows=64, kinds=KINDS) if attach else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(32, size.n, size.d, requires_grad=True)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if probe is not None:
                probe.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert probe is not None
    assert {probe.watch(site).adapter.kind for site in probe.sites} == {"linear", "mixed", "batched"}
    assert all(probe.watch(site).gemms == ["fprop", "dgrad", "wgrad"] for site in probe.sites)


def test_only_linears_unless_asked() -> None:
    model = nn.ModuleDict({"mix": FeatureMix(4, 2), "table": nn.Embedding(5, 3), "linear": nn.Linear(3, 3)})
    assert Probe(model).sites == ("linear",)
    assert Probe(model, kinds=("mixed", "lookup")).sites == ("mix", "table")


class Scaled(nn.Module):
    """A product of the user's own: y = x matrix^T."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


def test_a_user_registers_sites_of_their_own() -> None:
    assert find_adapter(Scaled()) is None
    register(Scaled, Adapter("linear", weight=lambda module: module.matrix))  # type: ignore[arg-type, return-value]
    torch.manual_seed(0)
    site, x = Scaled(), torch.randn(6, 5)
    watch = look(site, x).watch("site")
    assert (watch.k, watch.n, watch.gemms) == (5, 3, ["fprop", "wgrad"])
    assert torch.equal(watch.reservoir.x, x)
    with pytest.raises(ValueError, match="class of modules"):
        register(site, Adapter("linear"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of"):
        Adapter("convolution")  # type: ignore[arg-type]
