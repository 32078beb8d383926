"""Agreement across ranks: merge statistics in a tree, decide once, and name ranks that are missing or disagree.

    agreement = Agreement(timeout=60)
    agreement.merge(probe.dump, probe.absorb)              # rank 0 ends up with the statistics of all ranks
    plan = agreement.decide(lambda: records.to_json(report.plan()))     # decided on rank 0, the same bytes everywhere
    agreement.compare("weights", digest_of(model))         # raises on every rank, naming those that differ

Data is sent over the process group. Which ranks have arrived or failed, and their digests, are kept in the group's
store, which can be read with a time limit. So a rank that dies, is late or raises costs the others at most `timeout`
seconds, and all of them get a RankError that names it.

In round k of the tree, rank r receives from r + 2^k if r is a multiple of 2^(k + 1), and is done once it has sent. A
rank holds its own state and at most one that arrived.

Everything here takes and returns bytes. Their meaning (a Plan, Probe's statistics, a tuned configuration) is up to the
caller.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_POLL = 0.02  # seconds between reads of the store
# agreements of this process so far, by name and ranks: a new one must not read what an earlier one left in the store
_begun: Counter[str] = Counter()


class RankError(RuntimeError):
    """Some ranks are missing, failed or disagree.

    Args:
        message: what happened.
        ranks: the ranks at fault, as far as known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Agreement:
    """Operations that a group of ranks completes together or not at all.

    Every rank must make the same agreements and calls in the same order.

    Args:
        group: process group; None means the default one. Its backend must send tensors of `device`.
        timeout: seconds to wait for a missing rank.
        device: device of the tensors that are sent; gloo sends CPU tensors.
        name: distinguishes two agreements of one group.

    Example:
        >>> plan = Agreement(timeout=30).decide(lambda: records.to_json(plan))
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 60.0,
        device: torch.device | str = "cpu",
        name: str = "loka",
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"the timeout is in seconds, above 0, got {timeout}")
        if not dist.is_initialized():
            raise ValueError("there is no process group to agree in; hint: torch.distributed.init_process_group")
        self.group, self.timeout, self.device = group, timeout, torch.device(device)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        ranks = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        place = f"{name}/agreement/{hashlib.sha256(ranks.encode()).hexdigest()[:16]}"
        self._store = torch._C._distributed_c10d.PrefixStore(
            f"{place}/{_begun[place]}", dist.distributed_c10d._get_default_store()
        )
        _begun[place] += 1
        self._round = 0

    def compare(self, what: str, data: bytes) -> str:
        """Check that all ranks have the same bytes.

        Args:
            what: what is compared, for the message.
            data: this rank's bytes.

        Returns:
            Their digest.

        Raises:
            RankError: on every rank, naming the ranks that differ from the majority or are missing.
        """
        digest = hashlib.sha256(data).hexdigest()
        found = self._meet(f"compare {what}", digest)
        common, votes = Counter(found).most_common(1)[0]
        if votes == self.world:
            return digest
        tied = list(Counter(found).values()).count(votes) > 1
        common = found[0] if tied else common  # in a tie, rank 0 counts
        odd = tuple(rank for rank, seen in enumerate(found) if seen != common)
        seen = ", ".join(f"rank {rank} has {found[rank][:12]}" for rank in odd)
        raise RankError(
            f"{what} differs between ranks: {common[:12]} is what {'rank 0 has' if tied else 'most have'}, {seen}", odd
        )

    def meet(self, what: str) -> None:
        """Wait until every rank has arrived. A RankError names those that did not arrive in time."""
        self._meet(what, "here")

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Send the bytes of one rank to all of them, and check that they arrived intact.

        Args:
            data: the bytes, on the source; ignored elsewhere.
            source: the rank that sends.

        Returns:
            The bytes.
        """
        if self.rank == source and data is None:
            raise ValueError(f"rank {source} broadcasts, so it needs data")
        self._meet("broadcast", "ready")
        send = partial(dist.broadcast, async_op=True)
        length = torch.tensor([len(data) if data is not None else 0], device=self.device)
        self._do("broadcast from", source, send, length)
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            self._do("broadcast from", source, send, buffer)
        received = bytes(buffer.cpu().numpy())
        self.compare("what was broadcast", received)
        return received

    def decide(self, judge: Callable[[], bytes], *, source: int = 0) -> bytes:
        """Run a function on one rank and return its result on all of them.

        Args:
            judge: called on the source only; what it raises is raised on all ranks.
            source: the rank that decides.

        Returns:
            The bytes it returned.

        Raises:
            RankError: the function failed, or a rank is missing or received something else.
        """
        data, error = None, None
        if self.rank == source:
            try:
                data = judge()
            except Exception as raised:
                error = raised
        answer = "ok" if error is None else f"failed: {type(error).__name__}: {error}"
        try:
            self._meet("decide", answer)
        except RankError as told:
            raise told from error
        return self.broadcast(data, source=source)

    def merge(self, dump: Callable[[], bytes], absorb: Callable[[bytes], None]) -> bool:
        """Merge the state of every rank into that of rank 0, two at a time.

        Args:
            dump: returns this rank's state, with everything it has absorbed.
            absorb: merges another rank's state into this one's.

        Returns:
            True on rank 0, which then holds everything.

        Raises:
            RankError: a rank is missing, or could not dump or absorb.
        """
        self._meet("merge", "ready")
        problem: Exception | None = None
        try:
            self._climb(dump, absorb)
        except Exception as raised:
            problem = raised
        blamed = problem.ranks if isinstance(problem, RankError) else (self.rank,)
        text = "done" if problem is None else f"failed: {','.join(map(str, blamed))}: {problem}"
        try:
            self._meet("merged", text)
        except RankError as told:
            raise told from problem
        return self.rank == 0

    def _climb(self, dump: Callable[[], bytes], absorb: Callable[[bytes], None]) -> None:
        step = 1
        while step < self.world:
            if self.rank % (2 * step):
                self._send(dump(), self.rank - step)
                return
            if self.rank + step < self.world:
                absorb(self._receive(self.rank + step))
            step *= 2

    def _send(self, data: bytes, target: int) -> None:
        for tensor in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)):
            self._do("send to", target, dist.isend, tensor.to(self.device))

    def _receive(self, source: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._do("receive from", source, dist.irecv, length)
        buffer = torch.empty(max(int(length), 1), dtype=torch.uint8, device=self.device)
        self._do("receive from", source, dist.irecv, buffer)
        return bytes(buffer.cpu().numpy())[: int(length)]

    def _do(self, what: str, peer: int, start: Callable[..., Any], tensor: torch.Tensor) -> None:
        """Run a transfer from or to a rank with a time limit."""
        rank = peer if self.group is None else dist.get_global_rank(self.group, peer)
        try:
            work = start(tensor, rank, group=self.group)
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RankError(
                f"{what} rank {peer} did not finish in {self.timeout:g} s: rank {peer} is gone or stuck ({error})",
                (peer,),
            ) from error

    def _meet(self, what: str, word: str) -> list[str]:
        """Post a word and return those of all ranks. Raise if one is missing or starts with "failed"."""
        self._round += 1
        key = f"{self._round}/{what}"
        words: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout
        try:
            self._store.set(f"{key}/{self.rank}", word)
            while len(words) < self.world and time.monotonic() < deadline:
                for rank in range(self.world):
                    if rank not in words and self._store.check([f"{key}/{rank}"]):
                        words[rank] = self._store.get(f"{key}/{rank}").decode()
                if len(words) < self.world:
                    time.sleep(_POLL)
        except RuntimeError as error:  # the store lives on rank 0
            raise RankError(f"{what}: rank 0, which holds the store, is gone ({error})", (0,)) from error
        failed = {rank: text for rank, text in words.items() if text.startswith("failed: ")}
        if failed:
            raise RankError(
                f"{what}: {'; '.join(f'rank {rank} {text}' for rank, text in failed.items())}", self._blame(failed)
            )
        missing = tuple(rank for rank in range(self.world) if rank not in words)
        if missing:
            names = ", ".join(map(str, missing))
            raise RankError(
                f"{what}: rank {names} of {self.world} did not come within {self.timeout:g} s (dead, stuck, or doing something else)",
                missing,
            )
        return [words[rank] for rank in range(self.world)]

    @staticmethod
    def _blame(failed: dict[int, str]) -> tuple[int, ...]:
        """Return the ranks that failed ones blame, or the failed ones themselves if they blame no other."""
        blamed: set[int] = set()
        for rank, text in failed.items():
            first = text.removeprefix("failed: ").partition(": ")[0]
            named = {int(part) for part in first.split(",") if part.isdigit()}
            blamed |= named or {rank}
        return tuple(sorted(blamed))
