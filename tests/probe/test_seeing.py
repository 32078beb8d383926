"""A compiled model has two graphs, with and without the probe; both give the model's own results, and the probe sees what it would have seen eagerly."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from loka.probe import Probe

from .small import Small, batches


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> object:
    torch._dynamo.reset()
    yield None
    torch._dynamo.reset()


def run(backend: str | None, *, probed: bool = True, steps: int = 8, **options: int) -> tuple:
    """Losses, gradients and the probe after some steps; compiled when a backend is named."""
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=4, rows=16, **options) if probed else None
    counter = CompileCounterWithBackend(backend) if backend else None
    step = torch.compile(model, backend=counter, fullgraph=True) if counter else model
    losses = []
    for x, y in batches(steps):
        model.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(step(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        if probe is not None:
            probe.step()
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, probe, counter


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_graphs_and_no_more(backend: str) -> None:
    plain_losses, plain_grads, _, _ = run(None, probed=False)
    _, _, eager, _ = run(None, stagger=2)
    losses, grads, probe, counter = run(backend, stagger=2)
    assert counter.frame_count == 3  # two of the model, and that of the hook on its output
    assert probe.sampled_steps == 4  # two groups take turns, on steps 0, 2, 4, 6, in the same graph
    assert losses == pytest.approx(plain_losses, abs=1e-6)
    assert grads.keys() == plain_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], plain_grads[name], rtol=1e-4, atol=1e-6)
    for site in eager.sites:  # a compiled probe sees what an eager one sees
        mine, theirs = probe.watch(site), eager.watch(site)
        assert (mine.calls, mine.rows_seen, mine.gemms) == (theirs.calls, theirs.rows_seen, theirs.gemms)
        if mine.calls:
            torch.testing.assert_close(mine.reservoir.x, theirs.reservoir.x, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(mine.reservoir.dy, theirs.reservoir.dy, rtol=1e-4, atol=1e-6)


def test_a_site_without_gradient_is_seen_too() -> None:
    """Nothing in the graph depends on that op's result: it must not be dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 1))
    probe = Probe(model, every=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batches(1)[0][0]
    compiled(x).sum().backward()
    probe.step()
    assert probe.watch("0").gemms == ["fprop"]
    assert torch.equal(probe.watch("0").reservoir.x, x)


def test_validation_between_steps_adds_one_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 1))
    probe = Probe(model, every=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for x, _ in batches(6):
        compiled(x).sum().backward()
        probe.step()
        with torch.no_grad():
            compiled(x)
    assert counter.frame_count == 3
    assert probe.watch("0").calls == 3


def test_bf16_autocast_is_seen_in_bf16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
    x = batches(1)[0][0]
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        probe = Probe(model, every=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(x).float().sum().backward()
        probe.detach()
        assert torch.equal(probe.watch("0").reservoir.x, x.bfloat16().float())


def test_detached_the_graph_is_the_model_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 1))
    probe = Probe(model, every=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batches(1)[0][0]
    compiled(x).sum().backward()
    probe.detach()
    assert not model[0]._forward_hooks
    compiled(x).sum().backward()
    assert probe.watch("0").calls == 1


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.use_reentrant = use_reentrant

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inside(torch.tanh(self.inside(h))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        made = checkpoint(self.body, h, use_reentrant=self.use_reentrant)
        assert isinstance(made, torch.Tensor)
        out: torch.Tensor = self.last(made)
        return out


def direct(model: Checkpointed, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.last(model.body(torch.tanh(model.first(x))))
    return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_not_counted_twice(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant)
    x = batches(1)[0][0]
    probe = Probe(model, every=1, rows=64)
    direct(model, x).sum().backward()
    probe.step()
    expected = {site: probe.watch(site) for site in probe.sites}
    probe.detach()
    again = Probe(model, every=1, rows=64)
    model(x).sum().backward()
    again.step()
    for site, watch in expected.items():
        found = again.watch(site)
        assert (found.calls, found.rows_seen, found.gemms) == (watch.calls, watch.rows_seen, watch.gemms)
        assert torch.equal(found.reservoir.x, watch.reservoir.x)
        assert torch.equal(found.reservoir.dy, watch.reservoir.dy)


def test_compiled_recomputation_is_not_counted_twice() -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=False)
    x = batches(1)[0][0]
    expected = Probe(model, every=1, rows=64)
    model(x).sum().backward()
    expected.detach()
    probe = Probe(model, every=1, rows=64)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    probe.step()
    assert [probe.watch(site).calls for site in probe.sites] == [1, 2, 1]
    for site in probe.sites:  # also of the module called twice, x is still with its own dy
        torch.testing.assert_close(probe.watch(site).reservoir.x, expected.watch(site).reservoir.x)
        torch.testing.assert_close(probe.watch(site).reservoir.dy, expected.watch(site).reservoir.dy)


def test_graphs_made_without_the_probe_are_not_used_with_it() -> None:
    """Neither the model's own from before, nor those of a twin of the same class that is compiled afterwards."""
    torch.manual_seed(0)
    model, twin = nn.Sequential(nn.Linear(12, 1)), nn.Sequential(nn.Linear(12, 1))
    compiled, other = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, twin))
    x = batches(1)[0][0]
    compiled(x).sum().backward()
    probe = Probe(model, every=1)
    other(x).sum().backward()
    compiled(x).sum().backward()
    other(x).sum().backward()
    probe.step()
    assert probe.watch("0").calls == 1


def test_the_cast_of_a_gemm_is_shared_with_the_probe() -> None:
    """Under autocast the op is given what the GEMM is given, not a second copy in another type; also with a partitioner that saves little."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    casts = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        casts.append(sum("_to_copy" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    for probed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 8, bias=False))
        probe = Probe(model, every=1) if probed else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = torch.compile(model, backend=backend, fullgraph=True)(batches(1)[0][0])
        out.float().sum().backward()
        if probe is not None:
            probe.step()
            assert probe.watch("1").gemms == ["fprop", "dgrad", "wgrad"]
    forward, _, probed_forward, _ = casts
    assert forward == probed_forward == 2  # of x and of W
