"""Selection: the law against a plain sort of pairs, every backend against the law, to the last index.

Where there is no GPU the Triton tests need the interpreter, chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import pytest
import torch

from kernels.interpreter import run_interpreted
from loka.kernels import UnsupportedError, registry
from loka.kernels.topk import BeamTopkCall, TopkCall, beam_topk, reference, topk
from loka.measure.conformance import poisoned_allocations

INF = float("inf")


def scores(kind: str, rows: int, n: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(rows, n, generator=g)
    if kind == "ties":
        x = torch.randint(-3, 3, (rows, n), generator=g).float()
    elif kind == "rare":  # most are not there; the first row has fewer than any k
        x[torch.rand(rows, n, generator=g) < 0.9] = -INF
        x[0, 2:] = -INF
    elif kind == "equal":
        x = torch.zeros(rows, n)
        x[:, ::2] = -0.0
    elif kind == "special":
        x[torch.rand(rows, n, generator=g) < 0.05] = float("nan")
        x[torch.rand(rows, n, generator=g) < 0.05] = INF
    elif kind == "rising":  # the best all in one chunk, at the end
        x = torch.arange(n).float().expand(rows, n).contiguous()
    elif kind == "bf16":
        x = x.bfloat16()
    return x.to(device)


KINDS = ("normal", "ties", "rare", "equal", "special", "rising", "bf16")


def by_hand(x: torch.Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    values, indices = [], []
    for row in x.tolist():
        order = sorted(
            range(len(row)), key=lambda i: (0 if row[i] != row[i] else 1, -row[i] if row[i] == row[i] else 0, i)
        )
        kept = [i for i in order[:k] if row[i] != -INF]
        values.append([row[i] for i in kept] + [-INF] * (k - len(kept)))
        indices.append(kept + [0] * (k - len(kept)))
    return values, indices


def assert_same(found, law) -> None:
    for ours, theirs in zip(found, law, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_a_sort_of_pairs(kind: str) -> None:
    x = scores(kind, 3, 40, torch.device("cpu"))
    values, indices = topk(x, 9, backend="reference")
    expected_values, expected_indices = by_hand(x, 9)
    assert indices.tolist() == expected_indices
    torch.testing.assert_close(values.float(), torch.tensor(expected_values), rtol=0, atol=0, equal_nan=True)


def test_unsorted_is_the_same_set_by_index() -> None:
    x = scores("rare", 3, 40, torch.device("cpu"))
    values, indices = topk(x, 9, sorted=False, backend="reference")
    best, places = topk(x, 9, backend="reference")
    assert indices[0].tolist()[2:] == [0] * 7
    assert values[0, 2:].eq(-INF).all()
    for row in range(3):
        real = values[row] > -INF
        assert indices[row][real].tolist() == sorted(places[row][best[row] > -INF].tolist())
        assert torch.equal(x[row][indices[row][real]], values[row][real])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_order", [True, False])
def test_torch_settles_ties_as_the_law_does(kind: str, in_order: bool, device) -> None:
    for n, k in ((1, 1), (60, 1), (60, 17), (60, 60)):
        x = scores(kind, 3, n, device)
        assert_same(topk(x, k, sorted=in_order, backend="torch"), topk(x, k, sorted=in_order, backend="reference"))


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="k between 0 and the 5 scores of a row, got 6"):
        topk(x, 6)
    with pytest.raises(ValueError, match=r"scores \[rows, n\]"):
        topk(x[0], 2)
    with pytest.raises(ValueError, match="topk compares"):
        topk(x.double(), 2)
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 3, 4\)"):
        beam_topk(logits, torch.zeros(2, 3), 2, mask=torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"beam_scores must be float32 \(2, 3\)"):
        beam_topk(logits, torch.zeros(2, 4), 2)
    with pytest.raises(ValueError, match="3 beams x 4 codes, got 13"):
        beam_topk(logits, torch.zeros(2, 3), 13)


def test_triton_says_why_not() -> None:
    triton = registry.backend("topk", "triton")
    cuda = torch.device("cuda")
    assert "at most 8192" in triton.supports(TopkCall(1, 10000, 9000), cuda).reason
    assert "32-bit indices" in triton.supports(BeamTopkCall(1, 2**20, 2**12, 5), cuda).reason
    if not registry.backend("topk", "triton").supports(TopkCall(1, 5, 2), torch.device("cpu")):
        with pytest.raises(UnsupportedError, match="Triton needs a CUDA device"):
            topk(torch.zeros(1, 5), 2, backend="triton")


def beams(requests: int, width: int, codes: int, device, *, allowed: float | None = None, dtype=torch.float32):
    g = torch.Generator().manual_seed(width * codes)
    logits = torch.randn(requests, width, codes, generator=g).to(device, dtype)
    totals = -torch.rand(requests, width, generator=g).to(device)
    if width > 1:
        totals[0, 1] = -INF
    mask = None if allowed is None else (torch.rand(requests, width, codes, generator=g) < allowed).to(device)
    return logits, totals, mask


@pytest.mark.parametrize("allowed", [None, 0.3, 0.0])
def test_beams_are_what_the_plain_search_does(allowed: float | None, device) -> None:
    logits, totals, mask = beams(2, 6, 30, device, allowed=allowed)
    plain = totals[..., None] + logits.log_softmax(-1)
    plain = plain if mask is None else plain.masked_fill(~mask, -INF)
    for backend in ("reference", "torch"):
        values, parents, codes = beam_topk(logits, totals, 20, mask=mask, backend=backend)
        torch.testing.assert_close(values, plain.flatten(1).topk(20).values)
        real = values > -INF
        rows = torch.arange(2, device=device)[:, None].expand_as(parents)
        torch.testing.assert_close(plain[rows, parents, codes][real], values[real])
        assert not parents[~real].any()
        assert not codes[~real].any()


@pytest.fixture
def triton_device(device):
    if not registry.backend("topk", "triton").supports(TopkCall(1, 5, 2), device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


@pytest.mark.slow
def test_triton_in_the_interpreter(device) -> None:
    if registry.backend("topk", "triton").supports(TopkCall(1, 5, 2), device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")


# In the interpreter a program selects among 512 at most, so that a few thousand scores meet every level of maxima.
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [*((kind, 7, 7) for kind in KINDS), *((kind, 600, 20) for kind in ("ties", "rare", "special", "bf16"))],
)
def test_on_triton_same_as_the_law(triton_device, kind: str, n: int, k: int) -> None:
    x = scores(kind, 1, n, triton_device)
    assert_same(topk(x, k, backend="triton"), topk(x, k, backend="reference"))


def test_on_triton_two_levels_unsorted_and_strided(triton_device) -> None:
    wide = scores("ties", 1, 6000, triton_device)
    x = wide[:, :5001]
    assert_same(topk(x, 20, backend="triton"), topk(x, 20, backend="reference"))
    assert_same(topk(x, 33, sorted=False, backend="triton"), topk(x, 33, sorted=False, backend="reference"))


def test_on_triton_nothing_is_left_unwritten(triton_device) -> None:
    x = scores("rare", 2, 700, triton_device)
    with poisoned_allocations():
        found = topk(x, 50, backend="triton")
    assert_same(found, topk(x, 50, backend="reference"))
    assert found[0][0, 2:].eq(-INF).all()


def test_on_triton_no_rows_and_no_choice(triton_device) -> None:
    assert topk(torch.zeros(0, 5, device=triton_device), 2, backend="triton")[0].shape == (0, 2)
    assert topk(torch.zeros(2, 5, device=triton_device), 0, backend="triton")[1].shape == (2, 0)


@pytest.mark.parametrize(
    ("width", "codes", "allowed"), [(3, 20, None), (20, 40, 0.5), (20, 40, 0.002), (1, 600, None), (66, 9, 0.2)]
)
def test_on_triton_beams_same_as_the_law(triton_device, width: int, codes: int, allowed: float | None) -> None:
    logits, totals, mask = beams(2, width, codes, triton_device, allowed=allowed)
    lse = logits.logsumexp(-1)
    law = beam_topk(logits, totals, 20, mask=mask, lse=lse, backend="reference")
    assert_same(beam_topk(logits, totals, 20, mask=mask, lse=lse, backend="triton"), law)
    values, parents, picked = beam_topk(logits, totals, 20, mask=mask, backend="triton")
    torch.testing.assert_close(values, law[0], rtol=1e-5, atol=1e-5)
    assert (parents == law[1]).float().mean() > 0.9  # a sum rounded otherwise may swap neighbours
    assert (picked == law[2]).float().mean() > 0.9


def test_on_triton_compiles_to_one_graph(triton_device) -> None:
    registry.load("topk")  # torch.compile cannot trace an import
    logits, totals, mask = beams(2, 30, 40, triton_device, allowed=0.5)

    def both(logits, totals, mask):
        return *topk(logits.flatten(1), 9, backend="triton"), *beam_topk(logits, totals, 9, mask=mask, backend="triton")

    compiled = torch.compile(both, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same(compiled(logits, totals, mask), both(logits, totals, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for rows, n, k in ((2, 512 * 8192, 512), (1, 100_003, 1), (3, 40_000, 4000), (16, 8192, 512)):
        x = scores(kind, rows, n, device).to(dtype)
        assert_same(topk(x, k, backend="triton"), topk(x, k, backend="reference"))
        assert_same(topk(x, k, sorted=False, backend="triton"), topk(x, k, sorted=False, backend="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allowed", [None, 0.02, 1e-4, 0.0])
def test_real_beams_on_a_gpu(dtype: torch.dtype, allowed: float | None) -> None:
    for requests, width, codes in ((2, 512, 8192), (3, 1, 8192), (1, 2000, 5000), (2, 40, 20_000)):
        logits, totals, mask = beams(requests, width, codes, "cuda", allowed=allowed, dtype=dtype)
        lse = logits.float().logsumexp(-1)
        law = reference.beams(logits, totals, 512, mask=mask, lse=lse)
        assert_same(beam_topk(logits, totals, 512, mask=mask, lse=lse, backend="triton"), law)
        torch.testing.assert_close(
            beam_topk(logits, totals, 512, mask=mask, backend="triton")[0], law[0], rtol=1e-5, atol=1e-4
        )


@pytest.mark.gpu
def test_captured_on_a_gpu() -> None:
    """No host synchronisation: a graph replays with other scores in the same memory."""
    x = scores("normal", 4, 200_000, torch.device("cuda"))
    topk(x, 64, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk(x, 64, backend="triton")
    x.copy_(scores("ties", 4, 200_000, torch.device("cuda"), seed=5))
    graph.replay()
    assert_same(found, topk(x, 64, backend="reference"))
