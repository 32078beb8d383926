"""Routing: the law against plain loops and the model's own router, the kernel against the law.

Where there is no GPU the Triton tests need the interpreter, chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import pytest
import torch

from kernels.interpreter import run_interpreted
from loka.kernels import UnsupportedError, registry
from loka.kernels.grouped_mm import permute
from loka.kernels.route import RouterCall, route, route_sorted
from loka.measure.conformance import poisoned_allocations
from loka.nn import MixtureOfExperts
from loka.nn.experts import UNIT

CUDA = torch.device("cuda")
SHAPES = [(1, 32, 4, 2), (5, 70, 53, 3), (33, 128, 53, 3), (17, 40, 64, 8), (3, 16, 1, 1), (4, 24, 100, 16)]


def make(tokens: int, k: int, experts: int, *, dtype=torch.float32, device="cpu", spread: float = 0.1):
    g = torch.Generator().manual_seed(tokens * experts)
    x = torch.randn(tokens, k, generator=g).to(device, dtype)
    weight = (torch.randn(experts, k, generator=g) / k**0.5).to(device, dtype)
    balance = (spread * torch.randn(experts, generator=g)).to(device, torch.promote_types(dtype, torch.float32))
    return x, weight, balance


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_loops(shape, always: bool) -> None:
    *sizes, top = shape
    x, weight, balance = make(*sizes, dtype=torch.float64)
    ids, gates = route(x, weight, balance, top, always=always)
    assert ids.dtype == torch.int64
    for t in range(len(x)):
        s = [1 / (1 + float(torch.exp(-(x[t] @ w)))) for w in weight]
        best = sorted(range(len(s)), key=lambda e, s=s: (-(s[e] + float(balance[e])), e))[:top]
        share = [s[e] / sum(s[b] for b in best) for e in best]
        assert ids[t].tolist() == best + [len(s)] * always
        assert gates[t].tolist() == pytest.approx(share + [1.0] * always, rel=1e-9)


def test_same_as_the_models_router() -> None:
    moe = MixtureOfExperts(32, 16, routed=11, top=3)
    moe.balance.copy_(torch.randint(-200_000, 200_000, (11,)))
    x = torch.randn(40, 32)
    chosen, gates = moe.route(x)
    ids, ours = route(x, moe.router.weight, moe.balance * UNIT, 3, backend="reference")
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(ours, gates)


def special(device, dtype=torch.float32):
    """Equal scores, saturated ones, a NaN logit, and a token of NaNs: rows are x @ identity."""
    x = torch.tensor([[0.0] * 6, [1, 3, 3, 1, 3, 0], [200, 1, 300, 400, 0, 0], [-1e4] * 6, [float("nan")] * 6])
    x[0, 4] = -0.0
    return x.to(device, dtype), torch.eye(6, device=device, dtype=dtype), torch.zeros(6, device=device)


def test_ties_go_to_the_lowest_index() -> None:
    ids, gates = route(*special("cpu"), 3, backend="reference")
    assert ids.tolist() == [[0, 1, 2], [1, 2, 4], [0, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert gates[2].tolist() == pytest.approx([1 / 3] * 3)
    assert gates[4].isnan().all()


def test_balance_decides_who_and_not_how_much() -> None:
    x, weight, _ = make(1, 16, 4)
    balance = torch.tensor([0.0, 5.0, 0.0, 5.0])
    ids, gates = route(x, weight, balance, 2)
    assert sorted(ids[0].tolist()) == [1, 3]
    s = torch.sigmoid(x @ weight.T)[0]
    torch.testing.assert_close(gates[0], s[ids[0]] / s[[1, 3]].sum())


def test_mistakes_are_named() -> None:
    x, weight, balance = make(4, 16, 6)
    with pytest.raises(ValueError, match=r"x \[T, K\] and weight \[E, K\] of one dtype"):
        route(x, weight.half(), balance, 2)
    with pytest.raises(ValueError, match=r"balance must be torch.float32 \[6\], got torch.int64"):
        route(x, weight, balance.long(), 2)
    with pytest.raises(ValueError, match="visits 1 to 6 experts, got top=7"):
        route(x, weight, balance, 7)


def test_triton_says_why_not() -> None:
    triton = registry.backend("route", "triton")
    for call, reason in (
        (RouterCall(4, 16, 8, 2, torch.float64), "not torch.float64"),
        (RouterCall(4, 16, 300, 2), "up to 256 experts, not 300"),
        (RouterCall(4, 16, 64, 17), "up to 16 experts"),
    ):
        assert reason in triton.supports(call, CUDA).reason
    assert "not xpu" in triton.supports(RouterCall(4, 16, 8, 2), torch.device("xpu")).reason
    with pytest.raises(UnsupportedError, match=r"route backend 'triton' cannot run 4x16 float64 to 2 of 6 experts"):
        route(*make(4, 16, 6, dtype=torch.float64), 2, backend="triton")


@pytest.fixture
def triton_device(device):
    if not registry.backend("route", "triton").supports(RouterCall(1, 16, 4, 2, torch.float32), device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


@pytest.mark.slow
def test_in_the_interpreter(device) -> None:
    if registry.backend("route", "triton").supports(RouterCall(1, 16, 4, 2, torch.float32), device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")


def assert_same(ours, law, x, weight, balance, top: int, noise: float) -> None:
    """The law's experts where they are told apart by more than the noise of a sum in another order; its weights everywhere they agree."""
    keys = torch.sigmoid((x.double() @ weight.double().T).to(x.dtype).double()) + balance.double()
    order = keys.sort(dim=1, descending=True).values
    gaps = (order[:, :-1] - order[:, 1:])[:, :top]
    clear = (gaps > noise).all(1) if gaps.shape[1] else torch.ones(len(x), dtype=torch.bool, device=x.device)
    assert clear.float().mean() > 0.5
    assert torch.equal(ours[0][clear], law[0][clear])
    torch.testing.assert_close(ours[1][clear], law[1][clear], rtol=4 * noise, atol=noise)
    assert bool((ours[0] >= 0).all())
    assert bool((ours[0] < weight.shape[0] + 1).all())


NOISE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of a logit rounded to the other side


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_triton_same_as_the_law(triton_device, shape, dtype: torch.dtype, always: bool) -> None:
    *sizes, top = shape
    operands = make(*sizes, dtype=dtype, device=triton_device, spread=0.5)
    law = route(*operands, top, always=always, backend="reference")
    with poisoned_allocations():
        ours = route(*operands, top, always=always, backend="triton")
    noise = NOISE[dtype] if dtype == torch.float32 or triton_device.type == "cuda" else 1e-6
    assert_same(ours, law, *operands, top, noise)
    with pytest.raises(AssertionError):
        assert_same((ours[0] + 1, ours[1]), law, *operands, top, noise)


def assert_sorted(found, ids, gates, experts: int) -> None:
    """A sorted result is the plain one, sorted."""
    expected = permute(ids, experts, backend="reference")
    for name in ("order", "offsets", "inverse"):
        assert torch.equal(getattr(found[0], name), getattr(expected, name)), name
    assert found[0].top == ids.shape[1]
    torch.testing.assert_close(found[1], gates, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sorted_is_the_choice_sorted(shape, always: bool) -> None:
    *sizes, top = shape
    operands = make(*sizes)
    found = route_sorted(*operands, top, always=always, backend="reference")
    assert_sorted(found, *route(*operands, top, always=always, backend="reference"), sizes[2] + always)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (600, 16, 5, 2)], ids=str)
def test_on_triton_sorted_is_the_choice_sorted(triton_device, shape, always: bool) -> None:
    *sizes, top = shape
    operands = make(*sizes, device=triton_device)
    with poisoned_allocations():
        found = route_sorted(*operands, top, always=always, backend="triton")
    assert_sorted(found, *route(*operands, top, always=always, backend="triton"), sizes[2] + always)


def test_on_triton_sorted_whatever_the_numbers(triton_device) -> None:
    """Every row is somebody's, so that nothing is read from a place that was never written."""
    x, weight, balance = special(triton_device)
    assert_sorted(
        route_sorted(x, weight, balance, 3, backend="triton"), *route(x, weight, balance, 3, backend="triton"), 6
    )
    for value in (float("-inf"), float("inf"), float("nan")):
        found, _ = route_sorted(x, weight, torch.full_like(balance, value), 6, always=True, backend="triton")
        assert found.order.sort().values.tolist() == list(range(35))
        assert found.offsets.tolist() == [0, 5, 10, 15, 20, 25, 30, 35]
    empty, gates = route_sorted(x[:0], weight, balance, 2, always=True, backend="triton")
    assert empty.offsets.tolist() == [0] * 8
    assert gates.shape == (0, 3)


def test_on_triton_ties_and_special_values(triton_device) -> None:
    operands = special(triton_device)
    law, ours = (route(*operands, 3, always=True, backend=name) for name in ("reference", "triton"))
    assert torch.equal(ours[0], law[0])
    torch.testing.assert_close(ours[1], law[1], equal_nan=True)


def test_on_triton_indices_stay_inside_whatever_the_balance(triton_device) -> None:
    x, weight, balance = make(20, 16, 5, device=triton_device)
    for value in (float("-inf"), float("inf"), float("nan")):
        ids, _ = route(x, weight, torch.full_like(balance, value), 5, backend="triton")
        assert ids.sort(dim=1).values.tolist() == [[0, 1, 2, 3, 4]] * 20


def test_on_triton_rows_inside_others_and_none(triton_device) -> None:
    x, weight, balance = make(9, 48, 7, device=triton_device, spread=0.5)
    wide, tall = torch.cat([x, x], 1)[:, :48], weight.T.contiguous().T
    law = route(x, weight, balance, 2, backend="reference")
    assert torch.equal(route(wide, tall, balance, 2, backend="triton")[0], law[0])
    assert route(x[:0], weight, balance, 2, always=True, backend="triton")[0].shape == (0, 3)


def test_on_triton_compiles_to_one_graph(triton_device) -> None:
    registry.load("route")  # torch.compile cannot trace an import
    x, weight, balance = make(9, 48, 7, device=triton_device)

    def run(x):
        sorting, gates = route_sorted(x, weight, balance, 2, backend="triton")
        return *route(x, weight, balance, 2, always=True, backend="triton"), sorting.order, sorting.offsets, gates

    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")
    for ours, law in zip(compiled(x), run(x), strict=True):
        assert torch.equal(ours, law)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 512, 4096, 8191, 20_000])
@pytest.mark.parametrize("experts", [53, 64, 255])
def test_real_sizes_on_a_gpu(tokens: int, experts: int, dtype: torch.dtype) -> None:
    operands = make(tokens, 1408, experts, dtype=dtype, device=CUDA, spread=0.05)
    law = route(*operands, 3, always=True, backend="reference")
    ours = route(*operands, 3, always=True, backend="triton")
    agree = (ours[0] == law[0]).all(1)
    assert agree.float().mean() > (0.9 if tokens > 8 else 0.5)  # what remains are sums rounded to the other side
    torch.testing.assert_close(ours[1][agree], law[1][agree], rtol=1e-2, atol=1e-4)
    assert bool((ours[0][:, :3] < experts).all())
    assert all(len(set(row)) == 4 for row in ours[0][:64].tolist())
    assert_sorted(route_sorted(*operands, 3, always=True, backend="triton"), *ours, experts + 1)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_its_neighbours_and_a_graph_replays() -> None:
    x, weight, balance = make(4096, 1408, 53, dtype=torch.bfloat16, device=CUDA)
    together = route(x, weight, balance, 3, backend="triton")
    alone = route(x[70:75], weight, balance, 3, backend="triton")
    assert all(torch.equal(a, b[70:75]) for a, b in zip(alone, together, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(x, weight, balance, 3, backend="triton")
        found = route_sorted(x, weight, balance, 3, backend="triton")
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(captured[0], together[0].flip(0))
    assert_sorted(found, *captured, 53)
