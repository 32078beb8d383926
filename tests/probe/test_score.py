"""The score is the first-order change of the loss; it sees offsets, does not depend on the reduction, and comes out of a Probe as out of the function."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.dispatch.margin import share_of_margin
from loka.formats import Spec, fake_quantize, left_in_sum
from loka.probe import Probe
from loka.probe.score import SCORED, UPPER, Shown, harm, harm_from, operands_of, score_look
from loka.probe.shown import round_trip
from loka.probe.tally import Tally

from .small import Small, batches, train


def make(rows: int = 256, k: int = 16, n: int = 24, *, scale: float = 1.0) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    layer, head = nn.Linear(k, n), nn.Linear(n, 1)
    x = torch.randn(rows, k)
    y = layer(x)
    y.retain_grad()
    loss = scale * F.binary_cross_entropy_with_logits(head(torch.relu(y)), (x[:, :1] > 0).float())
    loss.backward()
    assert y.grad is not None
    return layer, x, y.grad, loss.detach()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "static"])
def test_sums_are_those_of_the_products(recipe: str) -> None:
    layer, x, dy, loss = make()
    weight = layer.weight.detach()
    sums = score_look(Shown(x, dy, weight, loss, loss, len(x)), [recipe])["fprop", recipe]
    chosen = operands_of(recipe, "fprop")
    assert chosen is not None
    spec = Spec.parse("e4m3:tensor") if recipe == "static" else chosen.a
    low = fake_quantize(x, spec) @ fake_quantize(weight, chosen.b).T
    r = ((low - x @ weight.T) * dy).sum(1).double() * len(x) / loss
    torch.testing.assert_close(
        sums, torch.stack([torch.tensor(256.0), r.sum(), (r**2).sum(), (r**4).sum()]).double(), rtol=1e-3, atol=1e-6
    )


def test_gradients_are_judged_by_the_direction_they_keep() -> None:
    layer, x, dy, loss = make()
    found = score_look(Shown(x, dy, layer.weight.detach(), loss, loss, len(x)))
    spec = Spec.parse("e4m3:row")
    exact, low = dy.T @ x, fake_quantize(dy.T.contiguous(), spec) @ fake_quantize(x.T.contiguous(), spec).T
    lost = 1 - F.cosine_similarity(exact.flatten(), low.flatten(), dim=0) ** 2
    assert float(found["wgrad", "rowwise"][1]) == pytest.approx(float(lost), rel=1e-2)
    assert 0 < float(lost) < 0.01
    assert ("wgrad", "rowwise_with_gw_hp") not in found
    assert ("dgrad", "static") not in found


def test_a_column_beside_a_huge_one_keeps_its_gradient_or_is_told() -> None:
    """A timestamp's weights have the largest gradient by far: the direction of the whole is kept whatever becomes of a raw year beside it."""
    torch.manual_seed(0)
    x = torch.stack([1.63e9 + 4.5e7 * torch.randn(512), 1975 + 14 * torch.randn(512), torch.randn(512)], 1)
    dy, weight, loss = torch.randn(512, 64), torch.randn(64, 3), torch.tensor(0.6)
    dy = dy - dy.mean(0)  # as behind a batch norm: what a mean adds to the gradient is taken away
    raw = score_look(Shown(x, dy, weight, loss, loss, 512))["wgrad", "rowwise"]
    ordinary = score_look(Shown((x - x.mean(0)) / x.std(0), dy, weight, loss, loss, 512))["wgrad", "rowwise"]
    assert float(raw[1]) > 0.1
    assert float(ordinary[1]) < 0.005


def _columns(*columns: Tensor) -> Tensor:
    """Columns beside sixteen ordinary ones."""
    return torch.cat([torch.stack(columns, 1), torch.randn(len(columns[0]), 16)], 1)


def test_a_column_that_hardly_varies_has_nothing_to_lose() -> None:
    """A SiLU at its minimum gives every example the same number: FP8 makes it one, and nothing is gone that was there. A year that varies like its neighbours is another matter."""
    torch.manual_seed(0)
    dy, loss = torch.randn(512, 64), torch.tensor(0.6)
    weight = torch.randn(64, 20)
    stuck = _columns(*(-0.278 + 4e-4 * torch.randn(512) for _ in range(4)))
    years = _columns(*(1975 + 14 * torch.randn(512) for _ in range(4)))
    lost = {
        name: float(score_look(Shown(x, dy, weight, loss, loss, 512, left=left_in_sum(dy)))["wgrad", "delayed"][1])
        for name, x in {"stuck": stuck, "years": years}.items()
    }
    assert lost["stuck"] < 0.002
    assert lost["years"] > 0.1


def test_a_column_that_varies_little_counts_where_the_weight_makes_much_of_it() -> None:
    """Beside columns a million times larger a year is small, and the weight of a model that has learned to read it is not."""
    torch.manual_seed(0)
    dy, loss, weight = torch.randn(512, 64), torch.tensor(0.6), torch.randn(64, 20)
    x = torch.cat([1975 + 14 * torch.randn(512, 8), 1e7 * torch.randn(512, 12)], 1)
    learned = torch.cat([weight[:, :8], 1e-6 * weight[:, 8:]], 1)

    def lost(w: Tensor) -> float:
        return float(score_look(Shown(x, dy, w, loss, loss, 512, left=left_in_sum(dy)))["wgrad", "delayed"][1])

    assert lost(learned) > 0.3
    assert lost(weight) < 0.01


def test_what_rounding_adds_to_the_mean_counts_beside_what_a_batch_adds_to_it() -> None:
    """Gradients of single examples pull at a column's mean too, in exact arithmetic as well, and by far more than their rounding does. Behind a batch norm they cancel, and rounding is what is left."""
    torch.manual_seed(0)
    x = torch.cat([3 + 0.3 * torch.randn(2048, 12), torch.randn(2048, 4)], 1)
    weight, loss = torch.randn(64, 16), torch.tensor(0.6)
    free = torch.randn(2048, 64)
    behind = free - free.mean(0)
    assert float(left_in_sum(free)) == pytest.approx(1.0, abs=0.3)
    assert float(left_in_sum(behind)) < 1e-8

    def lost(dy: Tensor, left: Tensor | None) -> float:
        return float(score_look(Shown(x[:512], dy[:512], weight, loss, loss, 2048, left=left))["wgrad", "delayed"][1])

    assert lost(free, left_in_sum(free)) < 0.8 * lost(behind, left_in_sum(behind))
    assert lost(free, None) == pytest.approx(lost(free, torch.zeros(())), rel=1e-6), (
        "what is not known counts as a batch norm"
    )


def test_a_column_too_large_to_square_is_lost_not_skipped() -> None:
    torch.manual_seed(0)
    x = _columns(1e21 + 1e18 * torch.randn(512))
    dy, weight, loss = torch.randn(512, 64), torch.randn(64, 17), torch.tensor(0.6)
    sums = score_look(Shown(x, dy, weight, loss, loss, 512, left=left_in_sum(dy)))["wgrad", "delayed"]
    assert float(sums[0]) == 1.0
    assert float(sums[1]) > 0.05


def test_a_gradient_of_one_number_per_example_is_not_rounded_unseen() -> None:
    """The last layer: tensorwise rounds each example's whole gradient to three bits, and every parameter upstream then weighs it differently."""
    torch.manual_seed(0)
    x, weight, wide = torch.randn(512, 32), torch.randn(1, 32), torch.randn(24, 32)
    dy = (torch.sigmoid(torch.randn(512, 1) - 1) - (torch.rand(512, 1) < 0.3).float()) / 512
    loss = torch.tensor(0.6)
    narrow = score_look(Shown(x, dy, weight, loss, loss, 512))
    broad = score_look(Shown(x, dy * torch.randn(1, 24), wide, loss, loss, 512))
    chosen = operands_of("tensorwise", "dgrad")
    assert chosen is not None
    low = fake_quantize(dy, chosen.a) @ fake_quantize(weight.T.contiguous(), chosen.b).T
    gain = ((low - dy @ weight) * (dy @ weight)).sum(1) / (dy @ weight).square().sum(1)
    power = (dy @ weight).square().sum(1)
    assert float(narrow["dgrad", "tensorwise"][2]) == pytest.approx(
        float((gain**2 * power).sum() / power.sum()), rel=1e-3
    )
    assert float(narrow["dgrad", "tensorwise"][2]) > 4 * float(broad["dgrad", "tensorwise"][2])
    assert float(narrow["dgrad", "rowwise"][2]) < 1e-9, "a scale for every row is exact here"
    assert float(narrow["wgrad", "tensorwise"][2]) == 0
    judged = {recipe: harm_from("dgrad", narrow["dgrad", recipe][None]) for recipe in ("tensorwise", "rowwise")}
    assert judged["tensorwise"] is not None
    assert judged["rowwise"] is not None
    assert judged["tensorwise"][0].high > share_of_margin(0.0002, 4) > judged["rowwise"][0].high


@pytest.mark.parametrize("scale", [1.0, 256.0, 65536.0])
def test_the_reduction_does_not_matter(scale: float) -> None:
    """A sum is 256 times the mean, a GradScaler multiplies by 2^16: loss and gradient move together."""
    layer, x, dy, loss = make(scale=scale)
    plain, px, pdy, ploss = make()
    a = harm(x, layer.weight, layer.bias, dy, "rowwise", loss=loss, nats=0.7)
    b = harm(px, plain.weight, plain.bias, pdy, "rowwise", loss=ploss, nats=0.7)
    assert a.high == pytest.approx(b.high, rel=1e-4)


def test_an_offset_scores_far_above_ordinary_sites() -> None:
    """A year as a column: the error of the product is the smallest of the model, its effect the largest."""
    torch.manual_seed(0)
    first = nn.Linear(16, 64)
    with torch.no_grad():
        first.bias.copy_(-(first.weight[:, 0] * 1975))
    x = torch.cat([1950 + 50 * torch.rand(256, 1), torch.randn(256, 15)], 1)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 1))
    probe = Probe(model, every=1)
    F.binary_cross_entropy_with_logits(model(x), (x[:, 1:2] > 0).float()).backward()
    probe.step()
    report = probe.evaluate(samples=5)
    for site, gemm, safety in (("0", "fprop", "unsafe"),):
        (verdict,) = [v for v in report.site(site).verdicts if v.gemm == gemm]
        assert verdict.safety == safety
    harms = {s: min(c.harm.low for c in report.site(s).candidates if c.gemm == "fprop" and c.harm) for s in ("0", "2")}
    highs = {s: max(c.harm.high for c in report.site(s).candidates if c.gemm == "fprop" and c.harm) for s in ("0", "2")}
    assert highs["0"] > 0.01
    assert highs["0"] > 5 * highs["2"]
    assert harms["0"] >= 0


def test_rows_of_an_example_add_up() -> None:
    """[B, T, K]: with all rows of every example, r is that of the sum; with some of them, its size is estimated without a bias."""
    torch.manual_seed(0)
    x, dy, weight = torch.randn(400, 8, 16), torch.randn(400, 8, 24) / 400, torch.randn(24, 16)
    x, dy = x + torch.randn(400, 1, 16), dy + torch.randn(400, 1, 24) / 400  # the rows of an example hang together
    loss = torch.tensor(0.5)

    def mean_square(t: int) -> float:
        rows = x[:, :t].reshape(-1, 16), dy[:, :t].reshape(-1, 24)
        shown = Shown(*rows, weight, loss, loss, 400, together=t, per_example=8)
        sums = score_look(shown, ["rowwise"])["fprop", "rowwise"]
        return float(sums[2] / sums[0])

    low = fake_quantize(x.reshape(-1, 16), Spec.parse("e4m3:row")) @ fake_quantize(weight, Spec.parse("e4m3:row")).T
    r = ((low - x.reshape(-1, 16) @ weight.T) * dy.reshape(-1, 24)).view(400, -1).sum(1) * 400 / loss
    assert mean_square(8) == pytest.approx(float(r.square().mean()), rel=1e-3)
    assert mean_square(4) == pytest.approx(float(r.square().mean()), rel=0.5)


def test_given_scales_saturate_what_they_have_not_seen() -> None:
    layer, x, dy, loss = make()
    weight = layer.weight.detach()
    ample = {"x": x.abs().amax(), "dy": dy.abs().amax()}
    small = {"x": x.abs().amax() / 16, "dy": dy.abs().amax()}
    fits, clipped = (harm(x, weight, None, dy, "static", loss=loss, largest=seen) for seen in (ample, small))
    assert clipped.high > 5 * fits.high


def test_more_examples_narrow_the_interval_and_low_contains_the_value() -> None:
    few = torch.tensor([[100.0, 1.0, 1.0, 0.2]], dtype=torch.float64)
    found, drift = harm_from("fprop", few) or (None, 0.0)
    many, _ = harm_from("fprop", few * 100) or (None, 0.0)
    assert found is not None
    assert many is not None
    assert drift == pytest.approx(0.01)
    assert found.low <= found.value <= found.high
    assert many.high < found.high
    assert harm_from("fprop", torch.zeros(1, 4, dtype=torch.float64)) is None


def test_a_probe_scores_every_gemm_of_every_recipe() -> None:
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1, rows=64)
    train(model, batches(6), probe)
    report = probe.evaluate(samples=3)
    assert report.record.units == 3
    for site in ("first", "twice", "last"):
        found = {(c.gemm, c.recipe) for c in report.site(site).candidates if c.harm is not None}
        gemms = report.site(site).gemms
        wanted = {(g, r) for g in gemms for r in ("tensorwise", "rowwise", "blockwise", "delayed")}
        assert found >= wanted
        assert ("fprop", "static") in found
    assert {v.safety for s in report.record.sites for v in s.verdicts if s.gemms} <= {"safe", "unsafe"}


def test_a_state_and_a_merge_keep_the_score() -> None:
    probes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Small()
        probe = Probe(model, every=1, rows=64)
        train(model, batches(4), probe)
        probes.append(probe)
    torch.manual_seed(0)
    again = Probe(Small(), every=1, rows=64)
    again.load_state_dict(probes[0].state_dict())
    one = probes[0].watch("first").tally
    assert again.watch("first").tally.harm("fprop", "rowwise") == one.harm("fprop", "rowwise")
    looks = one.looks
    probes[0].merge(probes[1].state_dict())
    assert one.looks == 2 * looks


def test_few_looks_are_scored_and_the_later_half_counts() -> None:
    assert [look for look in range(20) if Tally.due(look)] == [0, 1, 4, 8, 12, 16]
    tally = Tally(["rowwise"])
    for step, size in enumerate((100.0, 100.0, 1.0, 1.0)):
        sums = torch.tensor([64.0, 0.0, 64 * size**2, 64 * size**4], dtype=torch.float64)
        tally.add(step, sums.expand(len(tally.keys), 4), torch.tensor(0.0))
    found = tally.harm("fprop", "rowwise")
    assert found is not None
    assert found[0].value == pytest.approx(0.03)


def test_what_is_asked_must_make_sense() -> None:
    layer, x, dy, loss = make()
    with pytest.raises(ValueError, match="high precision"):
        harm(x, layer.weight, None, dy, "static", loss=loss, gemm="dgrad")
    with pytest.raises(ValueError, match="expected"):
        harm(x, layer.weight.T, None, dy, "rowwise", loss=loss)
    with pytest.raises(ValueError, match="no recipe"):
        operands_of("finest", "fprop")
    assert share_of_margin(0.0002, 16) == pytest.approx(0.00005)
    assert set(SCORED) >= {"tensorwise", "rowwise", "blockwise", "static", "delayed"}


@pytest.mark.parametrize(
    "spec", ["e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:128x128", "e5m2:row", "e4m3:1x32:e8m0", "e4m3:col"]
)
def test_the_short_way_rounds_like_the_law(spec: str) -> None:
    """Up to the last bit of a scale's reciprocal, which may move a value that lies between two codes."""
    torch.manual_seed(0)
    x = torch.randn(200, 300) * torch.exp(2 * torch.randn(200, 1))
    x[0] = 0.0
    short, law = round_trip(x, Spec.parse(spec)), fake_quantize(x, Spec.parse(spec))
    assert float((short != law).float().mean()) < 1e-3
    torch.testing.assert_close(short, law, rtol=0.13, atol=1e-6)


def test_what_several_calls_of_a_linear_do_adds_up() -> None:
    """Four calls with the same input are one whose output counts four times; each alone would look a quarter as harmful."""

    class Repeated(nn.Module):
        def __init__(self, calls: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head, self.calls = nn.Linear(12, 32), nn.Linear(32, 1), calls

        def forward(self, x: Tensor) -> Tensor:
            seen = sum(torch.tanh(self.layer(x)) for _ in range(self.calls)) * (4 / self.calls)
            return self.head(seen)

    harms = []
    for calls in (1, 4):
        model = Repeated(calls)
        probe = Probe(model, every=1, rows=64)
        train(model, batches(2), probe)
        found = probe.watch("layer").tally.harm("fprop", "rowwise")
        assert found is not None
        harms.append(found[0].value)
    assert harms[1] == pytest.approx(harms[0], rel=0.05)


class Split(nn.Module):
    """One linear, called once or for every part of the rows; what `dropped` calls more make is not used."""

    def __init__(self, parts: tuple[int, ...] = (), dropped: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.parts, self.dropped = nn.Linear(12, 32), nn.Linear(32, 1), parts, dropped

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.dropped):
            self.layer(x)
        parts = x.split(self.parts) if self.parts else (x,)
        return self.head(torch.cat([torch.tanh(self.layer(part)) for part in parts]))


def _harm_of(model: nn.Module, rows: int) -> float:
    probe = Probe(model, every=1, rows=64)
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(rows, 12, generator=generator), torch.randint(2, (rows, 1), generator=generator).float()) for _ in range(2)]  # fmt: skip
    train(model, data, probe)
    found = probe.watch("layer").tally.harm("fprop", "rowwise")
    assert found is not None
    return found[0].value


def test_small_calls_beside_a_large_one_make_the_score_at_most_sqrt_of_calls_too_large() -> None:
    parts = (1000, *[1] * 15)
    ratio = _harm_of(Split(parts), sum(parts)) / _harm_of(Split(), sum(parts))
    assert 0.9 < ratio < 1.1 * len(parts) ** 0.5


def test_calls_that_nothing_depends_on_do_not_count() -> None:
    assert _harm_of(Split(dropped=5), 128) == pytest.approx(_harm_of(Split(), 128), rel=0.05)


def test_what_the_examples_leave_open_widens_the_bound() -> None:
    """The mean of 100 examples is known to a fifth of its rms, that of 10,000 well; a few large ones say little about the rms."""

    def high(count: int, mean: float = 0.0, kurtosis: float = 3.0) -> float:
        made = harm_from("fprop", torch.tensor([[count, mean * count, count, kurtosis * count]]).double(), nats=0.0)
        assert made is not None
        return made[0].high

    assert high(10_000) == pytest.approx(UPPER, rel=0.02)
    assert high(100) > 1.96 / 100**0.5 > UPPER
    assert high(10_000, mean=0.3) > 0.3
    assert high(10_000, mean=0.3) - high(10_000, mean=0.2) == pytest.approx(0.1)
    assert high(400, kurtosis=100) > 1.3 * high(400)
