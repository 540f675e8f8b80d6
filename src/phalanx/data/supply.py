"""Where a loader gets its micro-batches: from indexed samples or from a stream, with one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from phalanx.data.assemble import Made
from phalanx.data.position import Position
from phalanx.data.prefetch import Prefetch
from phalanx.data.route import MicroBatch, Route
from phalanx.data.workers import Pool


class Queue(Protocol):
    """Micro-batches in order, from one position on."""

    @property
    def at(self) -> Position | None:
        """Where the next micro-batch begins; None inside a step."""
        ...

    def get(self) -> tuple[MicroBatch, Made] | None:
        """The next micro-batch, or None if a stream has ended before it."""
        ...

    def cancel(self) -> None: ...


class Supply(Protocol):
    """Which micro-batches come when, and what makes them."""

    def micro_count(self, epoch: int) -> int:
        """The number of micro-batches of a whole epoch, on this rank."""
        ...

    def step_count(self, epoch: int) -> int:
        """The number of its steps."""
        ...

    def reach(self, position: Position) -> Position:
        """`position`, or the start of the next epoch if its own is known to be finished."""
        ...

    def identity(self) -> dict[str, Any]:
        """What must match when a state is loaded, as plain data."""
        ...

    def queue(self, position: Position) -> Queue: ...

    def close(self) -> None: ...


class Numbered:
    """Indexed samples: a route through them, and a pool that makes the micro-batches. `start` starts the pool."""

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
