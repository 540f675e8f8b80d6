"""Ranks as threads of one process, for tests, for a notebook, and for a world of one.

    phalanx.run_local(4, lambda comm: comm.all_reduce(torch.ones(3)))

runs the same communicator, schedules and failure reports as a real job. Only the bytes are copied in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.streams import current_device
from phalanx.comm.transports import Message, MessagesOnly, TransportError


class LocalWorld:
    """The message queues that the threads share, one per (sender, receiver, tag)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._boxes: dict[tuple[int, int, int], deque[torch.Tensor]] = {}
        lock = threading.Lock()
        self._news = [threading.Condition(lock) for _ in range(size)]  # by receiver, so that a message wakes no other thread
        self._closed = False

    def put(self, source: int, dest: int, tag: int, x: torch.Tensor) -> None:
        with self._news[dest]:
            self._boxes.setdefault((source, dest, tag), deque()).append(x.clone())
            self._news[dest].notify_all()

    def take(self, source: int, dest: int, tag: int) -> torch.Tensor:
        key = (source, dest, tag)
        with self._news[dest]:
            while not self._boxes.get(key):
                if self._closed:
                    raise TransportError("the local world was closed")
                self._news[dest].wait()
            x = self._boxes[key].popleft()
            if not self._boxes[key]:
                del self._boxes[key]
            return x

    def close(self) -> None:
        """Wake threads that still wait for a message, which will not arrive."""
        with self._news[0]:  # they share one lock
            self._closed = True
            for news in self._news:
                news.notify_all()


class LocalTransport(MessagesOnly):
    """One thread's access to the queues."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self.address = "127.0.0.1"

    @property
    def device(self) -> torch.device | None:
        return current_device()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        for peer, x in sends:
            if x.numel():
                self.world.put(self.rank, peer, tag, x)
        return receives, tag

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        receives, tag = posted
        for peer, x in receives:
            if x.numel():
                x.copy_(self.world.take(peer, self.rank, tag))

    def can_carry(self, x: torch.Tensor) -> bool:
        return True
