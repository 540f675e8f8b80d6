"""What this rank is doing now: its answer when other ranks ask, and the clock that tells slow from hung."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.comm.failure import State
from phalanx.comm.pending import Operation
from phalanx.comm.traffic import Traffic


class Activity:
    """The operations of this rank that are under way, and the one before them."""

    def __init__(self) -> None:
        self.traffic: Traffic | None = None  # which messages are under way, where the transport knows
        self.current: Operation | None = None  # in the issuing thread
        self.flying: dict[threading.Thread, Operation] = {}  # begun; each thread waits for one
        self.awaited: Operation | None = None  # the one of them that the calling thread waits for
        self.on_device: Operation | None = None  # queued on a GPU, which has reached it
        self.doing: Callable[[], Operation] | None = None  # describes what the calling thread does itself
        self.last: str | Callable[[], Operation] = ""  # what ended last
        self.idle_since = time.monotonic()

    def got_on(self) -> None:
        """Note progress. The work calls it after each step, so that a long transfer does not count as a hang."""
        current = self.flying.get(threading.current_thread()) or self.current
        if current is not None:
            current.alive = time.monotonic()

    def state(self) -> State:
        """What this rank is doing now."""
        doing = self.doing
        current = self.current or (doing() if doing is not None else None) or self.awaited or self.on_device
        if current is None:
            last = self.last if isinstance(self.last, str) else self.last().name
            return State(operation=last, seconds=time.monotonic() - self.idle_since)
        awaited, posted = self.traffic.report() if self.traffic is not None else ((), ())
        seconds = time.monotonic() - current.alive
        return State(current.comm, current.number, current.name, seconds, awaited=awaited, posted=posted)
