"""Micro-batches made ahead of time, handed out in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx.data.assemble import Made
from phalanx.data.position import Position
from phalanx.data.route import MicroBatch
from phalanx.data.workers import Future, Pool


class Prefetch:
    """Prepares micro-batches, at most `depth` at a time, and hands them out in order."""

    def __init__(self, walk: Iterator[MicroBatch], pool: Pool, depth: int, at: Position) -> None:
        self._walk, self._pool, self._depth = walk, pool, depth
        self._ahead: deque[tuple[MicroBatch, Future]] = deque()
        self.at: Position | None = at  # where the next micro-batch begins; None inside a step

    def get(self) -> tuple[MicroBatch, Made]:
        """Return the next micro-batch, waiting for it."""
        self._fill(self._depth)
        wanted, future = self._ahead[0]
        made = future.result()
        self._ahead.popleft()
        self._fill(self._depth)  # refill while the user trains
        self.at = wanted.after if wanted.ends_step else None
        return wanted, made

    def cancel(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _fill(self, depth: int) -> None:
        while len(self._ahead) < depth:
            wanted = next(self._walk)
            self._ahead.append((wanted, self._pool.submit(wanted)))
