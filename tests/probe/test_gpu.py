"""On a GPU: the same numbers as on the CPU, and no waiting for the device on a sampled step."""

import pytest
import torch
from torch import nn

from loka.probe import Probe
from loka.probe.gaussian import Gaussian
from loka.probe.statistics import Statistics

pytestmark = pytest.mark.gpu


def test_statistics_equal_the_cpus() -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(700, 96, generator=g).sinh() * torch.logspace(-9, 3, 96)
    values[3, 4], values[5, 6], values[:, 7] = torch.nan, torch.inf, 0
    found = [Statistics(96, torch.device(device)) for device in ("cpu", "cuda")]
    for statistics in found:
        for part in values.split(300):
            statistics.update(part.to(statistics.raw_bins.device))
    here, there = found
    assert torch.equal(here.bins, there.bins)
    assert torch.equal(here.channel_absmax, there.channel_absmax.cpu())
    torch.testing.assert_close(there.moments, here.moments, rtol=1e-4, atol=0)


@pytest.mark.parametrize("cap", [4096, 64])
def test_covariances_equal_the_cpus(cap: int) -> None:
    g = torch.Generator().manual_seed(0)
    rows = 5 + torch.randn(3000, 200, generator=g) @ torch.randn(200, 200, generator=g)
    found = [Gaussian(200, torch.device(device), cap=cap) for device in ("cpu", "cuda")]
    for gaussian in found:
        for part in rows.split(1000):
            gaussian.update(part.to(gaussian.mean.device))
    here, there = (gaussian.covariance().cpu() for gaussian in found)
    assert float((here - there).norm() / here.norm()) < 2e-3  # the factors are bf16 there
    torch.testing.assert_close(found[1].mean.cpu(), found[0].mean, rtol=1e-4, atol=1e-4)
    assert found[1].sample(10, torch.Generator().manual_seed(0)).is_cuda


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sampled_step_does_not_wait_for_the_gpu(compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
    probe = Probe(model, every=1, rows=128)
    run = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(4096, 256, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        probe.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert probe.watch("0").calls == 2
    assert probe.watch("0").gemms == ["fprop", "wgrad"]
    rows = probe.watch("0").reservoir.x.cpu()
    assert all((x.bfloat16().float().cpu() == row).all(1).any() for row in rows[:4])
    for source in ("rows", "gaussian", "copula", "normal"):
        drawn = probe.watch("2").draw("x", source, 16, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        assert drawn.shape == (16, 512)
        assert drawn.is_cuda


def test_training_is_bit_identical() -> None:
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
        probe = Probe(model, every=2, rows=32) if attach else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        g = torch.Generator(device="cuda").manual_seed(1)
        for _ in range(6):
            loss = model(torch.randn(256, 64, generator=g, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if probe is not None:
                probe.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reduced_overhead_mode_leaves_the_probe_its_eyes() -> None:
    """CUDA graphs replay kernels, not Python: the probe's ops must stay outside of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
    probe = Probe(model, every=1, rows=32)
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(256, 64, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)  # a gradient of the last replay lives in memory that this one overwrites
        run(x).square().mean().backward()
        probe.step()
    assert probe.watch("0").calls == 4
    assert probe.watch("2").gemms == ["fprop", "dgrad", "wgrad"]
