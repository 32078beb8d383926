"""The loss is read off what the model returned and the gradient that came back; what cannot be read is told, or the report says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.probe import Probe
from loka.probe.loss import recognise
from loka.probe.watch import UNKNOWN_LOSS

from .small import Small, batches, train


def seen(z: Tensor, loss: Tensor) -> tuple[float, float]:
    (g,) = torch.autograd.grad(loss, z, retain_graph=True)
    rows = z.reshape(-1, z.shape[-1]) if z.dim() > 1 else z.reshape(-1, 1) if z.dim() else z
    found, nats = recognise(rows.detach(), g.reshape(rows.shape), rows.shape[0] if rows.dim() else 1)
    return float(found), float(nats)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, 1024.0, 0.25])
def test_cross_entropies_are_recognised_whatever_their_scale(reduction: str, factor: float) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(64, 1, requires_grad=True), (torch.rand(64, 1) < 0.3).float()
    losses = [F.binary_cross_entropy_with_logits(z, y, reduction=reduction) * factor]
    loss = losses[0]
    assert seen(z, loss)[0] == pytest.approx(float(loss), rel=1e-4)
    assert seen(z, loss)[1] == pytest.approx(float(F.binary_cross_entropy_with_logits(z, y)), rel=1e-4)
    p = torch.sigmoid(z.detach()).requires_grad_()
    loss = F.binary_cross_entropy(p, y, reduction=reduction) * factor
    assert seen(p, loss)[0] == pytest.approx(float(loss), rel=1e-3)
    many, labels = torch.randn(64, 10, requires_grad=True), torch.randint(10, (64,))
    labels[::5] = -100  # ignored
    loss = F.cross_entropy(many, labels, reduction=reduction) * factor
    assert seen(many, loss)[0] == pytest.approx(float(loss), rel=1e-3)


def test_a_model_that_returns_its_loss() -> None:
    z = torch.tensor(0.7, requires_grad=True)
    assert seen(z, z * 8)[0] == pytest.approx(5.6)


@pytest.mark.parametrize(
    "loss_fn", [lambda z, y: F.mse_loss(z, y), lambda z, y: z.sum(), lambda z, y: (z * torch.rand(64, 1)).sum()]
)
def test_other_losses_are_not_mistaken_for_one(loss_fn: object) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(64, 1, requires_grad=True), torch.randn(64, 1)
    assert seen(z, loss_fn(z, y))[0] != seen(z, loss_fn(z, y))[0]  # NaN
    tiny = (1e-6 * torch.randn(64, 1)).requires_grad_()
    found = seen(tiny, tiny.sum())[0]
    assert found != found


def test_an_unknown_loss_gives_no_score_until_it_is_told() -> None:
    torch.manual_seed(0)
    for told in (False, True):
        model = Small()
        probe = Probe(model, every=1, rows=64)
        for x, _ in batches(3):
            loss = F.mse_loss(model(x), x[:, :1])
            loss.backward()
            probe.step(loss if told else None)
        report = probe.evaluate(samples=2)
        site = report.site("first")
        forward = [
            c for c in site.candidates if c.gemm == "fprop"
        ]  # what gradients lose of a step does not depend on the loss
        assert any(c.harm is not None for c in forward) == told
        if not told:
            (verdict,) = [v for v in site.verdicts if v.gemm == "fprop"]
            assert verdict.safety == "not measured"
            assert site.unscored == UNKNOWN_LOSS
            assert UNKNOWN_LOSS in verdict.reason


def test_accumulated_micro_batches_have_a_loss_each() -> None:
    torch.manual_seed(0)
    model = Small()
    harms = []
    for accumulate in (1, 4):
        probe = Probe(model, every=1, rows=256)
        model.zero_grad()
        for x, y in batches(4):
            (F.binary_cross_entropy_with_logits(model(x), y) / accumulate).backward()
        probe.step()
        found = probe.watch("first").tally.harm("fprop", "rowwise")
        probe.detach()
        assert found is not None
        harms.append(found[0].value)
    assert harms[0] == pytest.approx(harms[1], rel=1e-4)


def test_a_compiled_model_is_scored_like_an_eager_one() -> None:
    found = []
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Small()
        probe = Probe(model, every=1, rows=64)
        step = model if backend is None else torch.compile(model, backend=backend)
        for x, y in batches(2):
            F.binary_cross_entropy_with_logits(step(x), y).backward()
            probe.step()
        found.append(probe.watch("twice").tally.harm("fprop", "rowwise"))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][0].value == pytest.approx(found[1][0].value, rel=1e-3)
    torch._dynamo.reset()


def test_several_outputs_add_up() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = torch.relu(self.body(x))
            return {"a": self.a(h), "b": self.b(h)}

    torch.manual_seed(0)
    model = Two()
    probe = Probe(model, every=1)
    x, y = batches(1)[0]
    out = model(x)
    loss = sum(F.binary_cross_entropy_with_logits(out[name], y) for name in ("a", "b"))
    loss.backward()
    (known,) = {float(probe._loss.settle(None)(0)[0])}
    assert known == pytest.approx(float(loss), rel=1e-4)


def test_training_is_still_bit_identical_while_it_is_scored() -> None:
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Small()
        probe = Probe(model, every=1, rows=64) if attach else None
        results.append((train(model, batches(6), probe), [p.detach().clone() for p in model.parameters()]))
        if probe is not None:
            assert probe.watch("first").tally.looks
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
