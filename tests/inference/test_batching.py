"""Batches form under a latency bound, cancelled requests vanish, and nobody disturbs anybody."""

import pytest
import torch

from loka.inference import Batcher, CancelledRequestError, Engine, EngineConfig, Request

from .small import make_model, make_requests


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(make_model("tiny"), EngineConfig(beams=4, requests=(1, 4), dtype="fp32"))


def test_waits_while_there_is_time_and_runs_when_it_is_full(engine: Engine) -> None:
    clock = Clock()
    batcher = Batcher(engine, latency=1.0, clock=clock)
    requests = make_requests(make_model("tiny"), (3, 5, 2, 9))
    tickets = [batcher.submit(r) for r in requests[:3]]
    assert batcher.step() == 0  # nobody is late, and a fourth may come
    assert not any(t.done for t in tickets)
    tickets.append(batcher.submit(requests[3]))
    assert batcher.step() == 4
    expected = engine.generate(requests)
    for ticket, found in zip(tickets, expected, strict=True):
        assert torch.equal(ticket.result(0).codes, found.codes)
    assert batcher.batches[0][:2] == ((4, 16), 4)


def test_the_oldest_request_decides(engine: Engine) -> None:
    clock = Clock()
    batcher = Batcher(engine, latency=1.0, clock=clock)
    batcher._times[1, 16] = 0.2
    (request,) = make_requests(make_model("tiny"), (3,))
    ticket = batcher.submit(request)
    clock.now = 0.7
    assert batcher.step() == 0
    clock.now = 0.85  # 0.85 + 0.2 is beyond the bound
    assert batcher.step() == 1
    assert ticket.latency == pytest.approx(0.85)


def test_takes_as_many_as_stay_within_the_bound(engine: Engine) -> None:
    clock = Clock()
    batcher = Batcher(engine, latency=1.0, clock=clock)
    batcher._times |= {(1, 16): 0.1, (4, 16): 0.8}
    tickets = [batcher.submit(r) for r in make_requests(make_model("tiny"), (1, 2, 3))]
    clock.now = 0.5  # one would be ready at 0.6, three not before 1.3
    assert batcher.step() == 1
    assert [t.done for t in tickets] == [True, False, False]
    clock.now = 3.0  # lost: then as many as fit
    assert batcher.step() == 2


def test_a_cancelled_request_leaves_and_the_others_stay(engine: Engine) -> None:
    batcher = Batcher(engine, latency=1.0, clock=Clock())
    requests = make_requests(make_model("tiny"), (3, 5, 2))
    tickets = [batcher.submit(r) for r in requests]
    assert tickets[1].cancel()
    assert batcher.step(flush=True) == 2
    with pytest.raises(CancelledRequestError):
        tickets[1].result(0)
    assert torch.equal(tickets[2].result(0).codes, engine.generate(requests[2:])[0].codes)
    assert not tickets[2].cancel()


def test_cancelled_while_its_batch_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(engine, latency=1.0, clock=Clock())
    tickets = [batcher.submit(r) for r in make_requests(make_model("tiny"), (3, 5))]
    plain = engine.generate

    def generate(requests: list[Request]) -> object:
        tickets[0].cancel()
        return plain(requests)

    monkeypatch.setattr(engine, "generate", generate)
    batcher.step(flush=True)
    with pytest.raises(CancelledRequestError):
        tickets[0].result(0)
    assert len(tickets[1].result(0).scores) == 4


def test_a_failing_batch_is_told_to_all_of_it_and_to_nobody_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(engine, latency=1.0, clock=Clock())
    (request,) = make_requests(make_model("tiny"), (3,))
    ticket = batcher.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate", lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
        batcher.step(flush=True)
    with pytest.raises(RuntimeError, match="broken"):
        ticket.result(0)
    later = batcher.submit(request)
    batcher.step(flush=True)
    assert len(later.result(0).scores) == 4


def test_bad_requests_are_refused_at_the_door(engine: Engine) -> None:
    batcher = Batcher(engine, latency=1.0)
    with pytest.raises(ValueError, match="outside"):
        batcher.submit(Request(torch.tensor([[99, 0, 0]])))
    with pytest.raises(ValueError, match="positive"):
        Batcher(engine, latency=0)


def test_serves_in_a_thread_and_closes(engine: Engine) -> None:
    requests = make_requests(make_model("tiny"), (3, 5, 2, 0, 1, 4))
    with Batcher(engine, latency=0.05) as batcher:
        tickets = [batcher.submit(r) for r in requests]
        found = [t.result(30) for t in tickets]
    for a, b in zip(found, engine.generate(requests), strict=True):
        assert torch.equal(a.codes, b.codes)
    with pytest.raises(ValueError, match="closed"):
        batcher.submit(requests[0])
