"""Updates of tables in low precision: the law against plain optimisers, every backend against the law, and updates that must not be lost."""

import math

import pytest
import torch

from kernels.interpreter import NOT_RUN, run_interpreted
from kernels.table_cases import bags, copy, table
from loka.formats import Draw
from loka.kernels import registry
from loka.kernels.embedding_bag import Rows, embedding_bag
from loka.kernels.embedding_bag.rows import largest_element
from loka.kernels.embedding_update import TRAINABLE, Rule, UpdateCall, embedding_update
from loka.kernels.embedding_update import reference as law
from loka.measure.conformance import poisoned_allocations

kinds = pytest.mark.parametrize("kind", TRAINABLE)
rules = pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])


def moved_by_torch(rule: str, weight: torch.Tensor, indices, offsets, grad, mode: str, steps: int) -> torch.Tensor:
    """Plain torch on a float32 table; SparseAdam is Adam on the rows that occur."""
    parameter = torch.nn.Parameter(weight.clone())
    makers = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}
    if rule in makers:
        optimizer = makers[rule]([parameter], lr=0.05)
    else:
        from loka.training.optimizers import RowwiseAdagrad

        optimizer = RowwiseAdagrad([parameter], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        out = torch.nn.functional.embedding_bag(
            indices, parameter, offsets, mode=mode, sparse=True, include_last_offset=True
        )
        out.backward(grad)
        optimizer.step()
    return parameter.detach()


@rules
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_float_rows_move_as_torch_moves_them(rule: str, mode: str) -> None:
    """Duplicates are summed before they are squared."""
    rows, (indices, offsets) = table("float32"), bags()
    grad = torch.randn(len(offsets) - 1, 24)
    expected = moved_by_torch(rule, rows.data, indices, offsets, grad, mode, 3)
    chosen = Rule(rule, lr=0.05)
    state = chosen.state(rows)
    for step in range(3):
        embedding_update(
            rows, indices, grad, chosen, state, Draw(step), offsets=offsets, mode=mode, backend="reference"
        )
    torch.testing.assert_close(rows.data, expected, rtol=1e-4, atol=1e-5)


@kinds
def test_weights_per_sample_count(kind: str) -> None:
    rows, (indices, offsets) = table(kind), bags()
    weights, grad = torch.randn(len(indices)), torch.randn(len(offsets) - 1, 24)
    start = rows.dequantize()
    embedding_update(rows, indices, grad, Rule("sgd", lr=1.0), (), Draw(0), offsets=offsets, weights=weights)
    bag = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    expected = start.index_add(0, indices, -grad[bag] * weights[:, None])
    quantum = {"float32": 1e-5, "bfloat16": 2.0**-7, "int8:row": 2 / 127, "e4m3:row:pow2": 2.0**-3}[kind]
    assert bool(((rows.dequantize() - expected).abs() <= quantum * expected.abs().amax(1, keepdim=True)).all())


@kinds
def test_what_has_no_gradient_stays_to_the_bit(kind: str) -> None:
    rows = table(kind, width=32)
    before = copy(rows)
    grad = torch.zeros(1, 32)
    grad[0, 5] = 0.01
    for step in range(20):
        embedding_update(rows, torch.tensor([4]), grad, Rule("sgd", lr=0.1), (), Draw(step))
    untouched = torch.ones(50, 32, dtype=torch.bool)
    untouched[4, 5] = False
    assert torch.equal(rows.dequantize()[untouched], before.dequantize()[untouched])


def drift(kind: str) -> torch.Tensor:
    """How far 1,000 updates of 1e-5 move 1.0, or what is next to it, for 4,096 elements."""
    rows = Rows.of(torch.ones(64, 64), kind)
    start = rows.dequantize().double()
    assert float((start - 1).abs().max()) < DRIFT_QUANTUM[kind] / 2
    grad, rule = torch.full((64, 64), -1.0), Rule("sgd", lr=1e-5)
    for step in range(1000):
        law.run(rows, torch.arange(64), None, grad, rule, (), Draw(step, stream=3))
    return rows.dequantize().double() - start


DRIFT_QUANTUM = {"bfloat16": 2.0**-7, "int8:row": 1.125 * 2.0**-7, "e4m3:row:pow2": 2.0**-3}


@pytest.mark.parametrize("kind", DRIFT_QUANTUM)
def test_a_thousand_small_updates_add_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0 becomes 1.01 on average, within four sigma; rounding to nearest, planted, leaves it where it was."""

    def off(values: torch.Tensor) -> float:
        # each update rounds up one quantum with probability 1e-5 / quantum, independently
        sigma = DRIFT_QUANTUM[kind] * math.sqrt(1000 * 1e-5 / DRIFT_QUANTUM[kind] / values.numel())
        return abs(float(values.mean()) - 0.01) / sigma

    assert off(drift(kind)) < 4
    monkeypatch.setattr(law, "uniform_bits", lambda rows, columns, draw, **_: torch.full((len(rows), columns), 2**22))
    planted = drift(kind)
    assert len(planted.unique()) == 1, "all elements are stuck at the same value"
    assert off(planted) > 12


@kinds
def test_shards_move_as_the_whole(kind: str) -> None:
    """Row-wise: equal to the bit. Column-wise: the same random numbers (a row's scale is its shard's)."""
    whole = table(kind, rows=40, width=32)
    start, grad = copy(whole), torch.randn(40, 32)
    rule, draw = Rule("sgd", lr=0.1), Draw(step=5, stream=9)
    embedding_update(whole, torch.arange(40), grad, rule, (), draw)
    part = Rows(start.data[16:], None if start.scale_code is None else start.scale_code[16:], start.spec)
    embedding_update(part, torch.arange(24), grad[16:], rule, (), draw, first_row=16)
    assert torch.equal(part.dequantize(), whole.dequantize()[16:])
    if kind == "bfloat16":
        columns = Rows(start.data[:, 8:24].clone())
        again = table(kind, rows=40, width=32)
        again.data[:, 8:24] = columns.data
        embedding_update(columns, torch.arange(40), grad[:, 8:24], rule, (), draw, first_column=8)
        fresh = Rows(again.data.clone())
        embedding_update(fresh, torch.arange(40), grad, rule, (), draw)
        assert torch.equal(columns.data, fresh.data[:, 8:24])


def test_kept_rows_move_in_float32() -> None:
    rows = table("e4m3:row:pow2", hot=True)
    start = copy(rows)
    embedding_update(rows, torch.tensor([7, 8]), torch.full((2, 24), 1e-6), Rule("sgd", lr=1.0), (), Draw(0))
    assert rows.hot is not None
    assert start.hot is not None
    torch.testing.assert_close(rows.hot[1], start.hot[1] - 1e-6, rtol=0, atol=1e-7)
    assert torch.equal(rows.data[7].view(torch.uint8), start.data[7].view(torch.uint8))
    assert torch.equal(embedding_bag(rows, torch.tensor([7]), backend="reference")[0], rows.hot[1])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["int8:row", "e4m3:row:pow2"])
def test_rows_beyond_the_range_of_scales_become_nan(kind: str, backend: str, device: torch.device) -> None:
    """Neither Inf nor the largest value that a scale holds; a row below the range has the smallest scale."""
    verdict = registry.backend("embedding_update", backend).supports(UpdateCall(3, 24, 3, 3, kind), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    rows = Rows.of(torch.tensor([1.0, 1.0, 1e-3], device=device)[:, None].expand(3, 24), kind)
    to = torch.tensor([largest_element(rows.spec), 1e30, 1e-10], device=device)
    grad, every = rows.dequantize() - to[:, None], torch.arange(3, device=device)
    embedding_update(rows, every, grad, Rule("sgd", lr=1.0), (), Draw(0), backend=backend)
    out = rows.dequantize()
    torch.testing.assert_close(out[0], to[:1].expand(24), rtol=2.0**-23, atol=0)
    assert bool(out[1].isnan().all())
    assert rows.scale_code[1:].tolist() == [255, 0]
    assert float(out[2].abs().max()) <= 2.0**-28
    embedding_update(rows, every, -grad, Rule("sgd", lr=1.0), (), Draw(1), backend=backend)
    assert rows.dequantize().isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@kinds
def test_nan_stays_visible(kind: str, backend: str, device: torch.device) -> None:
    """One of many elements; only a row of int8 is lost with it. Of a row without a finite element the scale is kept."""
    verdict = registry.backend("embedding_update", backend).supports(UpdateCall(50, 24, 1, 1, kind), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    rows = Rows.of(torch.randn(50, 24, device=device), kind)
    before, grad = copy(rows), torch.zeros(4, 24, device=device)
    grad[0, 2], grad[1, 3], grad[2, 4], grad[3] = math.nan, math.inf, -math.inf, math.nan
    at = torch.tensor([6, 9, 12, 15], device=device)
    embedding_update(rows, at, grad, Rule("sgd", lr=0.1), (), Draw(0), backend=backend)
    lost = ~rows.dequantize().isfinite()
    assert lost[at].any(1).tolist() == [True] * 4
    assert int(lost.sum()) == (4 * 24 if kind == "int8:row" else 3 + 24)
    same = ~lost
    same[at] = False
    assert torch.equal(rows.dequantize()[same], before.dequantize()[same])
    if kind == "e4m3:row:pow2":
        assert torch.equal(rows.scale_code, before.scale_code)


def test_a_scale_follows_the_row() -> None:
    rows = Rows.of(torch.full((2, 16), 0.5), "int8:row")
    embedding_update(rows, torch.tensor([0]), torch.full((1, 16), -100.0), Rule("sgd", lr=1.0), (), Draw(0))
    assert float((rows.dequantize()[0] - 100.5).abs().max()) <= 100.5 * 1.125 / 127
    embedding_update(rows, torch.tensor([0]), torch.full((1, 16), 100.45), Rule("sgd", lr=1.0), (), Draw(1))
    assert float(rows.dequantize()[0].abs().max()) < 2.0
    assert rows.scale is not None
    assert float(rows.scale[0]) < 0.02


def quanta(rows: Rows, kind: str) -> torch.Tensor:
    """A step of the grid at each element, at least."""
    values = rows.dequantize().abs()
    if kind == "float32":
        return values * 1e-5 + 1e-6
    if kind == "bfloat16":
        return values * 2.0**-7 + 1e-6
    assert rows.scale is not None
    if kind == "int8:row":
        return rows.scale[:, None].expand_as(values)
    return torch.maximum(values * 2.0**-3, rows.scale[:, None] * 2.0**-9)


@kinds
@pytest.mark.parametrize(("rule", "shape"), [("sgd", "item"), ("rowwise_adagrad", "sum"), ("adam", "mean")])
def test_triton_is_the_law(kind: str, rule: str, shape: str, device: torch.device) -> None:
    """Up to the last bit of a float32 sum, which may turn a rounding in one of many thousand elements."""
    verdict = registry.backend("embedding_update", "triton").supports(UpdateCall(50, 24, 9, 9, kind), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    rows = copy(table(kind, width=24 if shape == "sum" else 64, hot=shape == "sum"), device)
    indices, offsets = (t.to(device) for t in bags())
    given = None if shape == "item" else offsets
    grad = torch.randn(len(indices) if given is None else len(offsets) - 1, rows.width, device=device)
    weights = torch.rand(len(indices), device=device) if shape == "sum" else None
    chosen = Rule(rule, lr=0.05)
    tables = {"reference": copy(rows), "triton": copy(rows)}
    states = {name: chosen.state(rows) for name in tables}
    for step in range(1, 3):
        for name, held in tables.items():
            options = {
                "offsets": given,
                "weights": weights,
                "mode": "mean" if shape == "mean" else "sum",
                "first_row": 2**33,
            }
            embedding_update(
                held,
                indices,
                grad,
                chosen,
                states[name],
                Draw(step, stream=2**32 - 5, seed=11),
                **options,
                backend=name,
            )
        ours, theirs = tables["triton"], tables["reference"]
        gap = (ours.dequantize() - theirs.dequantize()).abs()
        assert bool((gap <= 1.01 * quanta(theirs, kind)).all())
        share = (gap > 1e-5 * theirs.dequantize().abs() + 1e-6).double().mean()
        assert float(share) < 0.002
        for a, b in zip(states["triton"], states["reference"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_triton_draws_the_numbers_of_the_law(device: torch.device) -> None:
    """One item a row and powers of two: no sum to differ in, so the bits must be equal."""
    verdict = registry.backend("embedding_update", "triton").supports(UpdateCall(50, 64, 50, 50, "int8:row"), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    wide = torch.logspace(-5, 0, 40)  # down to subnormal numbers of E4M3
    for kind in TRAINABLE:
        rows = Rows.of(torch.randn(500, 40) * wide, kind)
        rows.data[7] = (-rows.data[8].float().clamp(max=0)).to(rows.data.dtype)  # zeros of both signs
        rows, other, grad = copy(rows, device), copy(rows, device), (torch.randn(500, 40) * wide).to(device)
        grad[5:9] = 0
        every, rule = torch.arange(500, device=device), Rule("sgd", lr=2.0**-4)
        for held, name in ((rows, "triton"), (other, "reference")):
            embedding_update(held, every, grad, rule, (), Draw(1, 7, 3), first_column=16, backend=name)
        assert torch.equal(rows.data.view(torch.uint8), other.data.view(torch.uint8))
        assert rows.scale_code is None or torch.equal(rows.scale_code, other.scale_code)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("longest", [7, 8, 9, 31, 64, 67, 203])
def test_triton_adds_up_long_runs_in_chunks(
    longest: int, weighted: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs shorter and longer than a chunk of 8, beside each other, at every offset to the windows of the batch."""
    verdict = registry.backend("embedding_update", "triton").supports(UpdateCall(50, 24, 50, 50, "float32"), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    from loka.kernels.embedding_update import triton_kernels

    monkeypatch.setattr(triton_kernels, "CHUNK", 8)
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.tensor([3, longest, 8, 1, longest, 16, 5, 9, 24, 2, longest])
    rows = torch.tensor([0, 1, 2, 3, 5, 6, 7, 9, 10, 11, 12])
    indices = torch.repeat_interleave(rows, lengths)[torch.randperm(int(lengths.sum()), generator=generator)].to(device)
    grad = torch.randint(-8, 9, (len(indices), 24), generator=generator).float().to(device)  # sums are exact
    weights = torch.randint(1, 4, (len(indices),), generator=generator).float().to(device) if weighted else None
    held, other = (copy(table("float32", rows=13), device) for _ in range(2))
    other.data.copy_(held.data)
    with poisoned_allocations():
        options = {"weights": weights, "offsets": torch.arange(len(indices) + 1, device=device)} if weighted else {}
        embedding_update(held, indices, grad, Rule("sgd", lr=0.5), (), Draw(1), **options, backend="triton")
        embedding_update(other, indices, grad, Rule("sgd", lr=0.5), (), Draw(1), **options, backend="reference")
    torch.testing.assert_close(held.data, other.data, rtol=1e-6, atol=1e-5)


def test_triton_sums_a_run_alike_whatever_else_is_in_the_batch(device: torch.device) -> None:
    """A rank that has only some of the rows must add in the same order, or resuming on other ranks changes bits."""
    verdict = registry.backend("embedding_update", "triton").supports(UpdateCall(50, 24, 50, 50, "float32"), device)
    if not verdict:
        pytest.skip(f"{NOT_RUN}: {verdict.reason}")
    for length in (256, 300, 700):  # a chunk has 256 items: one, one and some, two and some
        found = []
        grad = torch.randn(length, 24, device=device)
        for before, after in ((0, 0), (1, 300), (5, 0), (300, 40)):
            held = Rows.of(torch.ones(4, 24, device=device), "float32")
            indices = torch.tensor([1] * before + [2] * length + [3] * after, device=device)
            given = torch.cat([torch.ones(before, 24, device=device), grad, torch.ones(after, 24, device=device)])
            embedding_update(held, indices, given, Rule("sgd", lr=0.1), (), Draw(1), backend="triton")
            found.append(held.data[2].clone())
        assert all(torch.equal(row, found[0]) for row in found), length


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_what_cannot_be_trained_is_refused() -> None:
    for kind in ("int4:row", "e4m3:row", "float16"):
        with pytest.raises(ValueError, match="cannot be trained"):
            embedding_update(table(kind), torch.tensor([1]), torch.zeros(1, 24), Rule("sgd"), (), Draw(0))
    with pytest.raises(ValueError, match="gradient of this lookup"):
        embedding_update(table("int8:row"), torch.tensor([1]), torch.zeros(2, 24), Rule("sgd"), (), Draw(0))
    with pytest.raises(ValueError, match="another state"):
        embedding_update(table("int8:row"), torch.tensor([1]), torch.zeros(1, 24), Rule("adam"), (), Draw(0))
    with pytest.raises(ValueError, match="rules are"):
        Rule("lion")
