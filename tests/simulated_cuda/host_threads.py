"""The modules `threading` and `queue` as the product sees them: their objects block on the conductor instead of the kernel.

A thread belongs to the simulated process of the thread that starts it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.simulated_cuda.conductor import Conductor, SimThread, here, me


class HostThreads:
    """`threading`: what is not here is the real one's."""

    def __init__(self, conductor: Conductor) -> None:
        class Event:
            def __init__(self) -> None:
                self._set = False

            def is_set(self) -> bool:
                return self._set

            def set(self) -> None:
                self._set = True

            def clear(self) -> None:
                self._set = False

            def wait(self, timeout: float | None = None) -> bool:
                return self._set or conductor.wait(self.is_set, timeout, "a threading.Event")

        class Lock:
            def __init__(self) -> None:
                self._owner: SimThread | None = None
                self._depth = 0

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                mine = me()
                if not self._free(mine):
                    if not blocking:
                        return False
                    if not conductor.wait(lambda: self._free(mine), None if timeout < 0 else timeout, "a lock"):
                        return False
                self._owner, self._depth = mine, self._depth + 1
                return True

            def _free(self, mine: SimThread | None) -> bool:
                return self._owner is None

            def release(self) -> None:
                self._depth -= 1
                if not self._depth:
                    self._owner = None

            def locked(self) -> bool:
                return self._owner is not None

            def __enter__(self) -> bool:
                return self.acquire()

            def __exit__(self, *error: object) -> None:
                self.release()

        class RLock(Lock):
            def _free(self, mine: SimThread | None) -> bool:
                return self._owner is None or self._owner is mine

        class Condition:
            def __init__(self, lock: Any = None) -> None:
                self._lock = lock or RLock()
                self._news = 0
                self.acquire, self.release = self._lock.acquire, self._lock.release

            def __enter__(self) -> bool:
                return self._lock.acquire()

            def __exit__(self, *error: object) -> None:
                self._lock.release()

            def wait(self, timeout: float | None = None) -> bool:
                seen = self._news
                self._lock.release()
                try:
                    return conductor.wait(lambda: self._news > seen, timeout, "a condition")
                finally:
                    self._lock.acquire()

            def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
                until = None if timeout is None else conductor.now + timeout
                while not predicate():
                    if not self.wait(None if until is None else until - conductor.now):
                        return predicate()
                return True

            def notify(self, n: int = 1) -> None:
                self._news += 1

            notify_all = notify

        class Thread(threading.Thread):
            def __init__(
                self,
                group: None = None,
                target: Callable[..., object] | None = None,
                name: str | None = None,
                args: Sequence[Any] = (),
                kwargs: Mapping[str, Any] | None = None,
                *,
                daemon: bool | None = None,
            ) -> None:
                super().__init__(group, target, name, args, kwargs, daemon=daemon)
                self._sim: SimThread | None = None

            def start(self) -> None:
                process = here.thread.process

                def run() -> None:
                    here.thread.product = self
                    self.run()

                self._sim = conductor.start(f"{process} {self.name}", process, run)

            def join(self, timeout: float | None = None) -> None:
                conductor.wait(lambda: not self.is_alive(), timeout, f"the end of {self.name}")

            def is_alive(self) -> bool:
                return self._sim is not None and not self._sim.finished

        self.Event, self.Lock, self.RLock, self.Condition, self.Thread = Event, Lock, RLock, Condition, Thread

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    @staticmethod
    def current_thread() -> threading.Thread:
        return getattr(me(), "product", None) or threading.current_thread()


class HostQueues:
    """`queue`: what is not here is the real one's."""

    def __init__(self, conductor: Conductor) -> None:
        class SimpleQueue:
            def __init__(self, maxsize: int = 0) -> None:
                self._items: deque[Any] = deque()

            def __class_getitem__(cls, item: Any) -> Any:
                return cls

            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                self._items.append(item)

            put_nowait = put

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if not self._items and not (block and conductor.wait(lambda: bool(self._items), timeout, "an item in a queue")):
                    raise queue.Empty
                return self._items.popleft()

            def get_nowait(self) -> Any:
                return self.get(block=False)

            def empty(self) -> bool:
                return not self._items

            def qsize(self) -> int:
                return len(self._items)

        self.SimpleQueue = self.Queue = SimpleQueue

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)
