"""Memory is planned before it is spent, and what is planned is what is used."""

import torch

from loka.probe.gaussian import Gaussian
from loka.probe.learned import Learned
from loka.probe.ledger import LEAST_CAP, SITE_BYTES, Ledger

WIDE = [(4096, 4096), (3072, 2048), (18432, 4096), (123200, 1024), (1024, 123200), (8192, 8192)]


def test_the_widest_sites_stay_under_their_limit() -> None:
    for x, dy in WIDE:
        ledger = Ledger(2**40, 1024)
        share = ledger.reserve("site", x, dy, True)
        assert share.cap
        assert share.bytes <= SITE_BYTES, (x, dy, share)
    assert Ledger(2**40, 1024).reserve("site", 4096, 4096, True).cap == 4096


def test_what_is_planned_is_what_is_allocated() -> None:
    for x, dy in ((300, 200), (700, 40)):
        share = Ledger(2 * 2**20, 64).reserve("site", x, dy, True)
        learned = Learned("site", (x, dy), torch.device("cpu"), 0, share, weight=True, window=10)
        learned.see(torch.randn(80, x), torch.randn(80, dy), None, 0, torch.Generator())
        parts = [*learned.gaussians.values()]
        tensors = [t for g in parts for t in (g.mean, *g.scatter.tensors().values())]
        tensors += [t for g in parts if hasattr(g.scatter, "omega") for t in (g.scatter.omega,)]
        reservoirs = [learned.reservoir, learned.windows.first, learned.windows.latest, learned.windows._current]
        tensors += [t for r in reservoirs for t in (r._x, r._dy)]
        if learned.matrix_normal is not None:
            tensors += [learned.matrix_normal._mean, learned.matrix_normal.u.blocks, learned.matrix_normal.v.blocks]
        assert sum(t.numel() * t.element_size() for t in tensors) == share.bytes


def test_the_cap_falls_until_all_fit() -> None:
    shapes = [(2048, 2048, True)] * 10
    roomy, tight = Ledger(2**40, 64), Ledger(200 * 2**20, 64)
    for ledger in (roomy, tight):
        ledger.prepare(shapes)
    assert roomy.cap == 4096
    assert LEAST_CAP <= tight.cap < 2048
    shares = [tight.reserve(str(number), *shape) for number, shape in enumerate(shapes)]
    assert all(share.cap == tight.cap for share in shares)  # the first does not starve the last
    assert tight.spent <= tight.budget
    assert tight.short == []


def test_late_sites_get_what_is_left() -> None:
    ledger = Ledger(8 * 2**20, 1024)
    while not ledger.short:
        ledger.reserve("late", 512, 512, True)
    assert ledger.spent <= ledger.budget
    assert Gaussian.bytes_for(512) > 0
