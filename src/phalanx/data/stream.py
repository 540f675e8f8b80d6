"""The steps of an `IterableDataset`, which can only be iterated over: one rank's items of each batch.

Every rank iterates over the whole stream and keeps its own items: item k of a step belongs to rank k % ranks. So each item is on
exactly one rank, all ranks see the end at the same place, and a run resumes on any number of ranks by skipping. A stream that is
expensive to read shards itself instead: each worker of each rank then has its own stream (stream_queue.py).

    items of the stream    0 1 2 3 4 5 6 7 | 8 9 10               batch 8, the end after 11 items
    rank                   a b a b a b a b | a b a                last="keep": a smaller step, ranks differ by at most one item
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.data import generators
from phalanx.data.assemble import Made, Maker, SampleError, ignore
from phalanx.data.batch import BatchPlan
from phalanx.data.draws import Draws
from phalanx.data.position import Last, share

_NOTHING = object()  # marks the end of the stream


@dataclass(frozen=True, slots=True)
class StreamShare:
    """The part of a stream that a worker reads: number `index` of `count`.

    Args:
        rank: The rank.
        size: The number of ranks.
        worker: The worker of this rank.
        workers: The number of workers of this rank; 1 if it has none.

    Example:
        >>> phalanx.data.StreamShare(rank=1, size=2, worker=0, workers=3).index
        3
    """

    rank: int = 0
    size: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def index(self) -> int:
        """The number of this share, from 0: `rank * workers + worker`."""
        return self.rank * self.workers + self.worker

    @property
    def count(self) -> int:
        """The number of all shares: `size * workers`."""
        return self.size * self.workers


_share: contextvars.ContextVar[StreamShare] = contextvars.ContextVar("share of a stream")


def stream_share() -> StreamShare:
    """Your share of the stream, for an `IterableDataset` that shards itself: call it in `__iter__`.

    With `Loader(..., sharded=True)` it is the share of this worker of this rank. Otherwise the loader divides the items, and
    it is the whole stream, number 0 of 1. So a data set that uses it works either way.

    Returns:
        A `StreamShare` with `index` and `count`, and `rank`, `size`, `worker` and `workers`.

    Example:
        >>> class Lines(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         mine = phalanx.data.stream_share()
        ...         return iter(range(mine.index, 12, mine.count))
        >>> phalanx.run_local(2, lambda comm: [x.tolist() for x in phalanx.data.Loader(Lines(), comm, batch=4, sharded=True)])
        [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    """
    return _share.get(StreamShare())


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A request for the step after the first `start` items of an epoch's stream."""

    seed: int
    epoch: int
    start: int


@dataclass(frozen=True, slots=True)
class StreamStep:
    """A rank's micro-batches of one step, or none if the stream has ended."""

    parts: tuple[Made, ...]
    items: int  # of the step, including those of other ranks
    ended: bool  # nothing comes after it
    empty: Any = None  # at the end: a micro-batch without samples, for ranks that have less than others

    def pinned(self) -> StreamStep:
        """Copy it to pinned memory."""
        return replace(self, parts=tuple(part.pinned() for part in self.parts))


@dataclass
class _Opened:
    """A stream that is open: item number `at` is `ahead`."""

    seed: int
    epoch: int
    items: Iterator[Any]
    at: int = 0
    ahead: Any = _NOTHING
    drawn: generators.States | None = None  # of the generators, after the items so far

    def serves(self, order: StepOrder) -> bool:
        """Whether the next item is where `order` starts. After the end there is none."""
        here = (self.seed, self.epoch) == (order.seed, order.epoch)
        return here and (self.at == order.start or (self.ahead is _NOTHING and self.at < order.start))


@dataclass(frozen=True)
class _Taken:
    """The items of a step: a rank's own with their numbers, the total count, and one example."""

    own: list[tuple[int, Any]]
    items: int
    example: Any
    ended: bool


@dataclass
class StreamMaker:
    """Makes steps of `maker.source`, one after the other: a worker's task. It keeps the stream open between orders.

    An order for another place restarts the epoch and skips, so the answer depends only on the order. With `sharded`, the stream
    is this worker's own. Otherwise all ranks iterate over the same one.
    """

    maker: Maker
    plan: BatchPlan
    last: Last
    share: StreamShare
    sharded: bool
    micro_batch: int | None = None
    _opened: _Opened | None = field(default=None, init=False, repr=False)

    def __call__(self, order: StepOrder, reading: Callable[[int], None] = ignore) -> StreamStep:
        token = _share.set(self.share if self.sharded else StreamShare())
        try:
            with generators.borrowed() if self.maker.is_seeding() else nullcontext():
                opened, self._opened = self._opened, None  # an exception leaves it closed
                if opened is None or not opened.serves(order):
                    opened = self._open(order, reading)
                elif opened.drawn is not None:
                    generators.put_back(opened.drawn)
                step = self._step(order, self._take(opened, order, reading))
                self._opened = opened
                return step
        finally:
            _share.reset(token)

    def name(self, index: int) -> str:
        """The name of an item for error messages."""
        return f"item {index} of the stream"

    def _open(self, order: StepOrder, reading: Callable[[int], None]) -> _Opened:
        dataset = self.maker.source
        if self.maker.is_seeding():
            who = self.share.index if self.sharded else 0  # a stream that all ranks read is the same on all
            generators.seed_all(generators.word(order.seed, order.epoch, who, generators.STREAMS))
        try:
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(order.epoch)
            opened = _Opened(order.seed, order.epoch, iter(dataset))
        except Exception as error:
            raise SampleError(f"the stream cannot be opened: {type(error).__name__}: {error}") from error
        self._advance(opened, reading, at=0)
        while opened.at < order.start and opened.ahead is not _NOTHING:
            self._advance(opened, reading, opened.at + 1)
        return opened

    def _advance(self, opened: _Opened, reading: Callable[[int], None], at: int) -> None:
        reading(at)
        try:
            opened.ahead = next(opened.items, _NOTHING)
        except Exception as error:
            raise SampleError(f"{self.name(at)}: {type(error).__name__}: {error}") from error
        opened.at = at

    def _take(self, opened: _Opened, order: StepOrder, reading: Callable[[int], None]) -> _Taken:
        own, items, item = [], 0, _NOTHING
        while items < self._batch(order) and opened.ahead is not _NOTHING:
            item = opened.ahead
            if items % self._ranks == (0 if self.sharded else self.share.rank):
                own.append((opened.at, item))
            items += 1
            self._advance(opened, reading, opened.at + 1)
        if self.maker.is_seeding():
            opened.drawn = generators.states()
        return _Taken(own, items, item, opened.ahead is _NOTHING)

    def _step(self, order: StepOrder, taken: _Taken) -> StreamStep:
        split = self.plan.at(order.epoch).split(self.share.size, self.micro_batch)
        if not taken.items or (self.last == "drop" and taken.items < self._batch(order)):
            if order.start == 0 and not self.sharded:
                remedy = "; take a smaller batch, or last='keep'" if taken.items else ""
                wanted = f"no batch of {self._batch(order)}{remedy}"
                raise SampleError(f"the stream of epoch {order.epoch} has {taken.items} items: {wanted}")
            return StreamStep((), 0, ended=True)
        count = split.micro_steps if self.sharded else -(-taken.items // (self._ranks * split.micro_batch))  # same on all ranks
        cuts = [share(range(len(taken.own)), count, number) for number in range(count)]
        empty = None
        if not all(len(cut) for cut in cuts) or (taken.ended and self.sharded and self.last == "keep"):
            empty = self.maker.empty_like(taken.example, order.seed, order.epoch, order.start + taken.items - 1)
        parts = tuple(self._made([taken.own[i] for i in cut], order) if len(cut) else Made(empty, 0) for cut in cuts)
        return StreamStep(parts, taken.items, taken.ended, empty if self.sharded else None)

    def _made(self, own: list[tuple[int, Any]], order: StepOrder) -> Made:
        draws = Draws(order.seed, order.epoch, np.array([index for index, _ in own]))
        return Made(self.maker.assembled([item for _, item in own], draws), len(own))

    @property
    def _ranks(self) -> int:
        """How many ranks read this stream."""
        return 1 if self.sharded else self.share.size

    def _batch(self, order: StepOrder) -> int:
        """The items of a step of this stream."""
        return self.plan.at(order.epoch).batch * self._ranks // self.share.size
