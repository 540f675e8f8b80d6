"""The epochs of a stream for the loader: steps are requested ahead and handed out in order until the stream ends.

A stream that all ranks read has one worker, or none. If the data set shards itself, each worker of a rank has a stream, and the
rank takes a step of each in turn, as torch's DataLoader does. These streams end at different places on different ranks. So the
ranks agree before each step, in one small all-reduce:

    last="drop"    the epoch ends when the first rank has no whole batch left
    last="keep"    it ends when the last rank has nothing left; ranks that run out get empty batches until then
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.data.assemble import Made, SampleError
from phalanx.data.batch import BatchPlan
from phalanx.data.position import Last, Position, Steps
from phalanx.data.route import MicroBatch
from phalanx.data.stream import StepOrder, StreamStep
from phalanx.data.supply import Queue
from phalanx.data.workers import Future, Pool


@dataclass(frozen=True)
class StreamPlan:
    """How a stream becomes steps: the same on all ranks."""

    batches: BatchPlan
    last: Last
    sharded: bool
    micro_batch: int | None
    length: int | None  # of the data set, if it has one


class Streamed:
    """The supply of a loader whose data set is a stream. `start()` starts a pool of one worker for each stream of this rank."""

    def __init__(self, plan: StreamPlan, comm: Any, workers: int, depth: int, start: Callable[[], Sequence[Pool]]) -> None:
        self._plan, self._comm, self._workers, self._depth, self._start = plan, comm, workers, depth, start
        self._pools: Sequence[Pool] | None = None

    def micro_count(self, epoch: int) -> int:
        split = self._plan.batches.at(epoch).split(self._comm.size, self._plan.micro_batch)
        steps = self._steps(epoch)
        if not len(steps):
            return 0
        largest = -(-len(steps[len(steps) - 1]) // self._comm.size)
        final = split.micro_steps if self._plan.sharded else -(-largest // split.micro_batch)
        return (len(steps) - 1) * split.micro_steps + final

    def step_count(self, epoch: int) -> int:
        return len(self._steps(epoch))

    def reach(self, position: Position) -> Position:
        batch = self._plan.batches.at(position.epoch).batch
        if self._plan.sharded and position.samples % batch:
            raise ValueError(f"{position}: a data set that shards itself resumes after whole batches of {batch} samples")
        return position

    def identity(self) -> dict[str, Any]:
        shares = {"shares": [self._comm.size, max(1, self._workers)]} if self._plan.sharded else {}
        return {"n": self._plan.length, "shuffle": False, **shares}

    def queue(self, position: Position) -> Queue:
        if self._pools is None:
            self._pools = self._start()
        streams = [_Ahead(pool, self._depth, position, self._stride(position.epoch)) for pool in self._pools]
        if self._plan.sharded:
            return _Agreed(streams, position, self._plan, self._comm)
        return _Whole(streams[0], position, self._plan)

    def close(self) -> None:
        for pool in self._pools or ():
            pool.close()

    def _stride(self, epoch: int) -> int:
        """How many items of a stream a step consumes."""
        return self._plan.batches.at(epoch).batch // (self._comm.size if self._plan.sharded else 1)

    def _steps(self, epoch: int) -> Steps:
        if self._plan.length is None:
            raise TypeError("this loader has no length: its IterableDataset has no __len__")
        return Steps(self._plan.length, self._plan.batches.at(epoch).batch, self._plan.last)


class _Ahead:
    """The steps of one stream, with `depth` of them requested ahead."""

    def __init__(self, pool: Pool, depth: int, begin: Position, stride: int) -> None:
        self._pool, self._depth, self._begin, self._stride = pool, depth, begin, stride
        self._ordered: deque[Future] = deque()
        self._next = 0
        self.ended = False

    def begin_at(self, start: int) -> None:
        """Start after `start` items."""
        self._next = start

    def get(self) -> StreamStep:
        self._fill()
        step: StreamStep = self._ordered[0].result()
        self._ordered.popleft()
        if step.ended:
            self.ended = True
            self.cancel()
        else:
            self._fill()
        return step

    def cancel(self) -> None:
        for future in self._ordered:
            future.cancel()
        self._ordered.clear()

    def _fill(self) -> None:
        while len(self._ordered) < self._depth:
            self._ordered.append(self._pool.submit(StepOrder(self._begin.seed, self._begin.epoch, self._next)))
            self._next += self._stride


class _Steps:
    """Hands out the micro-batches of one step after the other. Subclasses find the next step."""

    def __init__(self, position: Position, plan: StreamPlan) -> None:
        self._position, self._batch = position, plan.batches.at(position.epoch).batch
        self._parts: deque[tuple[MicroBatch, Made]] = deque()
        self.at: Position | None = position

    def get(self) -> tuple[MicroBatch, Made] | None:
        if not self._parts:
            found = self._next_step(self._position)
            if found is None:
                return None
            parts, step, ended = found
            here = self._position
            beyond = here.samples + self._batch
            after = Position(here.seed, here.epoch + 1) if ended else Position(here.seed, here.epoch, beyond)
            index, of = here.samples // self._batch, len(parts)
            self._parts += (
                (MicroBatch(here.seed, here.epoch, index, step, number, of, range(0), after), part)
                for number, part in enumerate(parts)
            )
            self._position = after
        wanted, made = self._parts.popleft()
        self.at = wanted.after if wanted.ends_step and wanted.after.epoch == wanted.epoch else None
        return wanted, made

    def _next_step(self, at: Position) -> tuple[tuple[Made, ...], range, bool] | None:
        """The micro-batches, the places of the step, and whether it is the last of its epoch; None if there is no step."""
        raise NotImplementedError


class _Whole(_Steps):
    """The steps of a stream that every rank reads."""

    def __init__(self, stream: _Ahead, position: Position, plan: StreamPlan) -> None:
        super().__init__(position, plan)
        self._stream = stream
        stream.begin_at(position.samples)

    def cancel(self) -> None:
        self._stream.cancel()

    def _next_step(self, at: Position) -> tuple[tuple[Made, ...], range, bool] | None:
        step = self._stream.get()
        return (step.parts, range(at.samples, at.samples + step.items), step.ended) if step.parts else None


class _Agreed(_Steps):
    """The steps of streams that end at different places on different ranks."""

    def __init__(self, streams: list[_Ahead], position: Position, plan: StreamPlan, comm: Any) -> None:
        super().__init__(position, plan)
        self._all, self._live, self._comm, self._keep = streams, deque(streams), comm, plan.last == "keep"
        self._micro_steps = plan.batches.at(position.epoch).split(comm.size, plan.micro_batch).micro_steps
        self._empty: Any = None
        for _ in range(position.samples // self._batch):  # resumed: keep the turns as they were
            self._own()

    def cancel(self) -> None:
        for stream in self._all:
            stream.cancel()

    def _own(self) -> StreamStep | None:
        """The next step of this rank, from its streams in turn, or None if all have ended."""
        while self._live:
            stream = self._live.popleft()
            step = stream.get()
            if step.ended:
                self._empty = step.empty if step.empty is not None else self._empty
            else:
                self._live.append(stream)
            if step.parts:
                return step
        return None

    def _next_step(self, at: Position) -> tuple[tuple[Made, ...], range, bool] | None:
        own = self._own()
        mine = [own.items if own else 0, int(own is not None), int(bool(self._live))]
        if self._comm.size > 1:
            mine = self._comm.all_reduce(torch.tensor(mine)).tolist()
        items, present, more = mine
        if present == 0 or (not self._keep and present < self._comm.size):
            if at.samples == 0:
                missing = self._comm.size - present
                raise SampleError(
                    f"{missing} of {self._comm.size} ranks have no batch in epoch {at.epoch}: their shares are too small"
                )
            return None
        ended = more == 0 if self._keep else more < self._comm.size
        if own is not None:
            return own.parts, range(at.samples, at.samples + items), ended
        if self._empty is None:
            raise SampleError(
                "this rank has no item in the whole epoch, and others have: give every share at least one, or use last='drop'"
            )
        return (Made(self._empty, 0),) * self._micro_steps, range(at.samples, at.samples + items), ended
