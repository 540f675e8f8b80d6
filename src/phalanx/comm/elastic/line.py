"""An agent's line to the board, in its own thread, so that a cut network blocks this thread and not the agent."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from phalanx.comm.elastic.agents import AgentKeys, Order
from phalanx.comm.elastic.coordinator import ASLEEP, BEAT, LOST

LOOK = 0.02  # seconds between two looks for orders, on the host of the board
FAR = 0.1  # the same from another host: orders are rare

Write = Callable[[AgentKeys], None]


class Line:
    """Sends what the agent posts, in order, gives its signs of life, and collects orders."""

    def __init__(self, keys: AgentKeys, agent: int, budget: Callable[[], int], *, far: bool) -> None:
        self._keys, self._agent, self._budget = keys, agent, budget
        self._pause = FAR if far else LOOK
        self._posted: queue.SimpleQueue[Write] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._answered = self._looked = time.monotonic()
        self._broken = ""
        self._given_up = False  # the agent has learned that the board is lost, and will come back as another one
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="phalanx-line", daemon=True)
        self._thread.start()

    def post(self, write: Write) -> None:
        self._posted.put(write)

    def orders(self) -> list[Order]:
        """The orders that have come since the last call."""
        found = []
        while not self._orders.empty():
            found.append(self._orders.get())
        return found

    def lost(self) -> str:
        """Why the board cannot be reached; empty while it can. Once it is not empty, the agent gives no more signs of life."""
        now = time.monotonic()
        if now - self._looked > ASLEEP:  # this process was stopped: the board may have answered meanwhile
            self._answered = now
        self._looked = now
        silent = now - self._answered
        why = self._broken or (f"has not answered for {silent:.1f} s" if silent > LOST else "")
        self._given_up = self._given_up or bool(why)
        return why

    def close(self) -> None:
        """Send what was posted, if the board still answers."""
        self._over.set()
        self._thread.join(1.0)

    def _talk(self) -> None:
        count, beaten, read = 0, 0.0, 0
        try:
            while (order := self._keys.order_at(read)) is not None:  # given before this agent came
                read += 1
                if order.kind in ("begin", "over"):
                    self._orders.put(order)
            while not (self._over.is_set() and self._posted.empty()):
                with contextlib.suppress(queue.Empty):
                    self._posted.get(timeout=self._pause)(self._keys)
                if not self._given_up and (now := time.monotonic()) - beaten >= BEAT:
                    beaten, count = now, count + 1
                    self._keys.live(self._agent, count, self._budget())
                while (order := self._keys.order_at(read)) is not None:
                    read += 1
                    self._orders.put(order)
                self._answered = time.monotonic()
        except RuntimeError as error:
            self._broken = f"was lost ({str(error).splitlines()[0]})"
