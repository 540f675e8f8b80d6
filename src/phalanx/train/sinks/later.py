"""Run a sink in its own thread, so that a slow or unreachable server delays no step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from phalanx.train.sinks.sink import Row, RunFacts, Sink

WAITING = 10_000  # the most queued rows: hours of training, a few MB
PATIENCE = 30.0  # seconds that the end of a run waits for the last rows


class Later:
    """Calls `sink` in order, in a thread. Its first exception goes to `failed`; after that, rows are dropped."""

    def __init__(self, sink: Sink, failed: Callable[[Exception], None]) -> None:
        self.name = sink.name
        self._sink, self._failed = sink, failed
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._given_up = False
        # a daemon: the process must be able to exit while a server does not answer
        self._thread = threading.Thread(target=self._work, name=f"phalanx-{sink.name}", daemon=True)
        self._thread.start()

    def begin(self, facts: RunFacts) -> None:
        self._put(lambda: self._sink.begin(facts))

    def write(self, row: Row) -> None:
        self._put(lambda: self._sink.write(row))

    def close(self) -> None:
        """Wait for the last rows, at most PATIENCE."""
        self._put(self._sink.close)
        self._put(None)
        if self._given_up:
            return
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._give_up(TimeoutError(f"the last rows did not arrive within {PATIENCE:g} s"))

    def _put(self, call: Any) -> None:
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(TimeoutError(f"{WAITING:,} rows wait for it"))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._given_up:
            try:
                call()
            except Exception as error:  # noqa: BLE001, PERF203  a sink may raise anything, and training continues
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._given_up:
            self._given_up = True
            self._failed(error)
