"""gloo: host tensors between simulated processes. Waits block the host, on the conductor's clock.

A wait that runs out of time breaks all connections of its rank, as gloo's does; the product relies on that.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from tests.simulated_cuda.simulation import process, simulation

LIMIT = 1800.0  # seconds


class Work:
    """torch.distributed.Work, of gloo."""

    def __init__(self, group: Any, ranks: Sequence[int], what: str) -> None:
        self._group, self._ranks, self._what = group, ranks, what
        self.done = False

    def _broken(self) -> bool:
        broken = self._group.pairs.setdefault("broken", set())
        return any(rank in broken or not _alive(rank) for rank in self._ranks)

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = LIMIT if timeout is None or not timeout.total_seconds() else timeout.total_seconds()
        simulation().conductor.wait(lambda: self.done or self._broken(), seconds, self._what)
        if self.done:
            return True
        if self._broken():
            raise RuntimeError(f"[/simulated/gloo/pair.cc:1] Connection closed by peer in {self._what}")
        self._group.pairs["broken"].add(process().rank)
        raise RuntimeError(f"[/simulated/gloo/unbound_buffer.cc:1] Timed out waiting {seconds * 1e3:.0f}ms for {self._what}")


def _alive(rank: int) -> bool:
    return all(own.alive for own in simulation().processes if own.rank == rank and "world" in own.own)


def _box(group: Any, *key: Any) -> tuple[deque[Any], deque[Any]]:
    """Messages without a receive, and receives without a message."""
    return group.pairs.setdefault(key, (deque(), deque()))  # type: ignore[no-any-return]


def send(group: Any, source: int, dest: Any, tag: int, x: torch.Tensor) -> Work:
    """It is buffered."""
    messages, receives = _box(group, source, dest, tag)
    if receives:
        target, work = receives.popleft()
        _deliver(x, target, source, dest)
        work.done = True
    else:
        messages.append(x.detach().clone())
    made = Work(group, (source, dest), f"a send from rank {source} to rank {dest}")
    made.done = True
    return made


def receive(group: Any, source: Any, dest: int, tag: int, x: torch.Tensor) -> Work:
    messages, receives = _box(group, source, dest, tag)
    work = Work(group, (source, dest), f"a message from rank {source} to rank {dest}, tag {tag}")
    if messages:
        _deliver(messages.popleft(), x, source, dest)
        work.done = True
    else:
        receives.append((x.detach(), work))
    return work


def _deliver(message: torch.Tensor, target: torch.Tensor, source: int, dest: int) -> None:
    if message.nbytes != target.nbytes:
        raise RuntimeError(f"rank {source} sent {message.nbytes} bytes, rank {dest} has room for {target.nbytes}")
    into, sent = (x.as_strided((x.numel(),), (1,)).view(torch.uint8) for x in (target, message))  # one element, any stride
    with torch.no_grad():
        into.copy_(sent)


def collective(group: Any, kind: str, call: Any, tensors: Sequence[torch.Tensor], run: Any, async_op: bool) -> Any:
    """Waits for all members, and computes in rank order."""
    from tests.simulated_cuda.nccl import Meeting

    own = process()
    number = group.number("gloo", own.rank)
    meeting = group.meetings.setdefault(("gloo", number), Meeting(group.ranks, run))
    meeting.join(own.rank, [x.detach() for x in tensors], (kind, *call), f"{group}, operation {number} of gloo")
    work = Work(group, group.ranks, f"{kind} {number} of {group}")
    meeting.works = [*getattr(meeting, "works", []), work]
    if len(meeting.parts) == len(group.ranks):
        with torch.no_grad():
            run({rank: part.tensors for rank, part in meeting.parts.items()})
        for each in meeting.works:
            each.done = True
    if async_op:
        return work
    work.wait()
    return None
