"""The path through a chain is the cheapest there is, and one whose costs are known."""

import itertools
import random

import pytest

from loka.dispatch.chain import BF16, REPRESENTATIONS, ChainOp, Edge, check_chain, shortest_path


def brute_force(count: int, edges: list[Edge], last: str = BF16) -> float | None:
    """Every way through, at most one conversion at a place (two would only cost more)."""
    best: list[float] = []

    def walk(place: int, form: str, cost: float, converted: bool) -> None:
        if (place, form) == (count, last):
            best.append(cost)
        for edge in edges:
            if (edge.start, edge.reads) == (place, form) and not (converted and edge.start == edge.stop):
                walk(edge.stop, edge.writes, cost + edge.microseconds, edge.start == edge.stop)

    walk(0, BF16, 0.0, False)
    return min(best, default=None)


def random_edges(dice: random.Random, count: int) -> list[Edge]:
    forms = REPRESENTATIONS[:3]
    edges = []
    for start, stop in itertools.product(range(count + 1), repeat=2):
        for reads, writes in itertools.product(forms, forms):
            conversion = start == stop and reads == BF16 != writes  # as the real ones: only from bf16
            forward = start < stop <= min(start + 3, count)
            if (conversion or forward) and dice.random() < 0.5:
                edges.append(Edge(start, stop, reads, writes, f"{start}{stop}", dice.random() + 0.01))
    return edges


@pytest.mark.parametrize("seed", range(40))
def test_the_path_is_the_cheapest(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randint(1, 5)
    edges = random_edges(dice, count)
    last = dice.choice(REPRESENTATIONS[:3])
    path, expected = shortest_path(count, edges, last=last), brute_force(count, edges, last)
    if expected is None:
        assert path is None
        return
    assert path is not None
    assert sum(e.microseconds for e in path) == pytest.approx(expected)
    places = [(0, BF16), *((e.stop, e.writes) for e in path)]
    assert [(e.start, e.reads) for e in path] == places[:-1]
    assert places[-1] == (count, last)


def test_a_cheap_kernel_behind_a_dear_conversion_loses() -> None:
    row = "e4m3:row"
    plain = Edge(0, 1, BF16, BF16, "bf16", 10.0)
    fast = Edge(0, 1, row, BF16, "scaled_mm", 4.0)
    assert shortest_path(1, [plain, fast, Edge(0, 0, BF16, row, "quantize", 7.0)]) == [plain]
    assert len(shortest_path(1, [plain, fast, Edge(0, 0, BF16, row, "quantize", 5.0)]) or []) == 2


def test_nonsense_is_refused() -> None:
    linear = ChainOp("a", "linear", 8, 4)
    with pytest.raises(ValueError, match="writes 4 columns, b reads 8"):
        check_chain([linear, ChainOp("b", "linear", 8, 4)], BF16, BF16)
    with pytest.raises(ValueError, match="at least one op"):
        check_chain([], BF16, BF16)
    with pytest.raises(ValueError, match="no representation 'fp4'"):
        check_chain([linear], BF16, "fp4")
    with pytest.raises(ValueError, match="keeps its width"):
        ChainOp("n", "norm", 8, 4, "rms")
    with pytest.raises(ValueError, match="keeps its width and says what it is"):
        ChainOp("n", "activation", 8, 8)
    with pytest.raises(ValueError, match="goes forward and takes time"):
        Edge(1, 0, BF16, BF16, "x", 1.0)
