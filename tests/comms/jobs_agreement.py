"""What the ranks of the agreement tests run, faults included."""

import os
import signal
import time

import torch.distributed as dist

from loka.comms import Agreement, RankError


def agree(size: int) -> dict:
    """Everything works: a sum in a tree, a decision, a comparison; and how many states a rank held at most."""
    agreement = Agreement(timeout=30)
    rank = dist.get_rank()
    state = {"total": rank + 1, "ranks": [rank], "absorbed": 0}
    payload = bytes(size)

    def dump() -> bytes:
        return f"{state['total']}/{','.join(map(str, state['ranks']))}/".encode() + payload

    def absorb(data: bytes) -> None:
        total, ranks, rest = data.split(b"/", 2)
        assert rest == payload
        state["total"] += int(total)
        state["ranks"] += [int(r) for r in ranks.split(b",")]
        state["absorbed"] += 1

    whole = agreement.merge(dump, absorb)
    plan = agreement.decide(lambda: b"plan of rank 0")
    empty = agreement.broadcast(b"" if rank == 1 else None, source=1)
    digest = agreement.compare("plans", plan)
    agree_again(rank)
    return {**state, "whole": whole, "plan": plan, "empty": empty, "digest": digest}


def agree_again(rank: int) -> None:
    """Another agreement of the same name, and one of other ranks, read nothing that the first left in the store."""
    for what in (b"one", b"two"):
        time.sleep(0.3 * (rank == 1 and what == b"two"))  # the others look before it has come
        Agreement(timeout=30, name="twice").compare("it", what)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    Agreement(halves[rank // 2], timeout=30, name="halves").compare("it", f"half {rank // 2}".encode())


def faults(kinds: list[str], culprit: int) -> list[dict]:
    """One rank misbehaves, in several ways, each in a group of its own; every rank tells whom it blames and how long it took."""
    return [fault(kind, culprit) for kind in kinds]


def fault(kind: str, culprit: int) -> dict:
    """One rank misbehaves; the others tell whom they blame and how long it took."""
    group = dist.new_group(backend="gloo")
    dist.barrier(group)  # or the culprit may be killed while others still connect to it
    agreement = Agreement(group, timeout=3, name=kind)
    rank, start = dist.get_rank(), time.monotonic()
    if rank == culprit and kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if kind in ("absent", "killed"):
            if rank == culprit:
                time.sleep(6)
            else:
                agreement.merge(lambda: b"x", lambda data: None)
        elif kind == "raises":

            def dump() -> bytes:
                if rank == culprit:
                    raise RuntimeError("no statistics here")
                return b"x"

            agreement.merge(dump, lambda data: None)
        elif kind == "judge":
            agreement.decide(lambda: b"" + bytes(1 // (rank - rank)))
        elif kind == "disagrees":
            agreement.compare("the plan", b"mine" if rank == culprit else b"ours")
    except RankError as error:
        return {"ranks": error.ranks, "message": str(error), "seconds": time.monotonic() - start}
    return {"ranks": None, "message": "", "seconds": time.monotonic() - start}
