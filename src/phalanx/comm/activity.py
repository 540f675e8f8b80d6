"""What this rank is doing now. Other ranks ask for it, and its clock tells a slow rank from a hung one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.comm.failure import State
from phalanx.comm.pending import Operation
from phalanx.comm.traffic import Traffic


class Activity:
    """The pending operations of this rank, and the last one that ended."""

    def __init__(self) -> None:
        self.traffic: Traffic | None = None  # the messages in flight, if the transport knows them
        self.current: Operation | None = None  # the operation that the issuing thread runs
        self.flying: dict[threading.Thread, Operation] = {}  # started operations, by the thread that waits for each
        self.awaited: Operation | None = None  # the one of them that the user's thread waits for
        self.on_device: Operation | None = None  # the operation that a GPU is running
        self.doing: Callable[[], Operation] | None = None  # describes what the user's thread does itself
        self.last: str | Callable[[], Operation] = ""  # the last operation that ended
        self.idle_since = time.monotonic()

    def got_on(self) -> None:
        """Note progress. Running operations call it after each step, so that a long transfer does not count as a hang."""
        current = self.flying.get(threading.current_thread()) or self.current
        if current is not None:
            current.alive = time.monotonic()

    def state(self) -> State:
        """Return what this rank is doing now."""
        doing = self.doing
        current = self.current or (doing() if doing is not None else None) or self.awaited or self.on_device
        if current is None:
            last = self.last if isinstance(self.last, str) else self.last().name
            return State(operation=last, seconds=time.monotonic() - self.idle_since)
        awaited, posted = self.traffic.report() if self.traffic is not None else ((), ())
        seconds = time.monotonic() - current.alive
        return State(current.comm, current.number, current.name, seconds, awaited=awaited, posted=posted)
