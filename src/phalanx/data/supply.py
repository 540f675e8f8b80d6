"""Where a loader gets its micro-batches from: samples with numbers, or a stream. Both look alike from the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from phalanx.data.assemble import Made
from phalanx.data.position import Position
from phalanx.data.prefetch import Prefetch
from phalanx.data.route import MicroBatch, Route
from phalanx.data.workers import Pool


class Queue(Protocol):
    """Micro-batches in their order, from one position on."""

    @property
    def at(self) -> Position | None:
        """Where what comes next begins; None amid a step."""
        ...

    def get(self) -> tuple[MicroBatch, Made] | None:
        """The next one; None where a stream turns out to have ended before it."""
        ...

    def cancel(self) -> None: ...


class Supply(Protocol):
    """What comes when, and who makes it."""

    def micro_count(self, epoch: int) -> int:
        """The number of micro-batches of a whole epoch, on this rank."""
        ...

    def step_count(self, epoch: int) -> int:
        """The number of its steps."""
        ...

    def reach(self, position: Position) -> Position:
        """`position`, or the next epoch where nothing is known to be left of its own."""
        ...

    def identity(self) -> dict[str, Any]:
        """What must be equal where a state is loaded, as plain data."""
        ...

    def queue(self, position: Position) -> Queue: ...

    def close(self) -> None: ...


class Numbered:
    """Samples with numbers: a route through them, and a pool that makes what lies on it. `start` starts the pool."""

    def __init__(self, route: Route, shuffle: bool, depth: int, start: Callable[[], Pool]) -> None:
        self.route, self._shuffle, self._depth, self._start = route, shuffle, depth, start
        self._pool: Pool | None = None  # started by the first iteration

    def micro_count(self, epoch: int) -> int:
        return self.route.micro_count(Position(0, epoch))

    def step_count(self, epoch: int) -> int:
        return len(self.route.steps(Position(0, epoch)))

    def reach(self, position: Position) -> Position:
        return self.route.reach(position)

    def identity(self) -> dict[str, Any]:
        return {"n": self.route.n, "shuffle": self._shuffle}

    def queue(self, position: Position) -> Queue:
        if self._pool is None:
            self._pool = self._start()
        return Prefetch(self.route.walk(position), self._pool, self._depth, position)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
