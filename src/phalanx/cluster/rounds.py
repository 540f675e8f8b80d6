"""One round of messages, from clocks to clocks: a few array operations without contention, queues at ports with it.

What depends on the schedule alone is computed once, when a program is made. `scaled` adds what depends on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .fair import TICK, fair_ends
from .routes import IN, OUT, Routes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEARLY = 0.01  # of a message: in large programs, those that begin closer together share their port as if they began at once
Ports = dict[str, Floats]  # by kind of port, when each of them is free again
SINCE = {OUT: "port out, busy since", IN: "port in, busy since"}  # when ports were last idle


@dataclass(slots=True)
class Doubts:
    """`met`: rounds are not exact for this run.

    A message waited for one of another round, or of the messages of a port some were held back there and others elsewhere.
    """

    met: bool = False


@dataclass(frozen=True, slots=True)
class Direct:
    """Messages that share no port, sender or receiver with each other."""

    src: Ints
    dst: Ints
    passing: Floats  # s per byte of the buffer, in the slowest port
    latency: Floats
    notice: Floats  # s after the receiver is ready
    by_sender: Ints | None  # if all ranks send and receive: the messages by sender; they are in the order of receivers

    def scaled(self, nbytes: float, _ports: Ports, _doubts: Doubts | None = None) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`."""
        src, dst, notice = self.src, self.dst, self.notice
        leaves = self.passing * nbytes
        arrives = leaves + self.latency
        receiver = self.by_sender
        if receiver is not None:
            leaves = leaves[receiver]

            def all_ranks(clock: Floats) -> Floats:
                begin = np.maximum(clock[src], clock + notice)
                return np.asarray(np.maximum(begin + arrives, begin[receiver] + leaves))

            return all_ranks

        def some_ranks(clock: Floats) -> Floats:
            begin = np.maximum(clock[src], clock[dst] + notice)
            after = clock.copy()
            after[src] = np.maximum(after[src], begin + leaves)
            after[dst] = np.maximum(after[dst], begin + arrives)
            return after

        return some_ranks


@dataclass(frozen=True, slots=True)
class Queue:
    """The ports of one stage with the messages of a round. These share them fairly, after those of earlier rounds."""

    key: str
    ports: Ints | slice
    slots: Ints | slice  # which messages pass here
    column: Ints  # by message, the place of its port in `ports`
    first: Ints  # by port, its first message; the others follow it
    each: int  # messages of every port, or 0 if ports have different numbers of them
    cells: Ints  # by message, its place in a table with a column per port
    shape: tuple[int, int]
    work: Floats  # s per byte of the buffer, by message, alone in its port
    taking: Floats  # the same, if all messages of the port come at once
    busy: Floats  # s per byte of the buffer, by port, until all of these have passed
    rate: float  # bytes/s of a port
    most: float  # the part of it that one message can use
    own: bool  # the sender's own port, before the wire

    def serve(
        self, head: Floats, taking: Floats, busy: Floats, work: Floats, near: Floats, free: Floats, since: Floats | None
    ) -> tuple[Floats, Floats]:
        """When the first and last bytes of messages pass that arrive at `head`. Updates `free`, when ports become free.

        `taking`, `busy` and `work` are the fields of this name in seconds. Messages that are no more than `near` apart begin at
        once. `since`, if it matters, is when the ports were last idle.
        """
        was_free = free[self.ports]
        if self.each:  # as a table, without an index
            table = np.maximum(head.reshape(-1, self.each), was_free[:, None])
            begin, lead = table.ravel(), table[:, 0].copy()
            equal = self.each == 1 or bool((table[:, 1:] == table[:, :1]).all())
        else:
            begin = np.maximum(head, was_free[self.column])
            lead = begin[self.first]
            equal = bool((begin == lead[self.column]).all())
        done, end = begin + taking, lead + busy
        if not equal:
            apart = np.abs(begin - lead[self.column]) > near
            if apart.any():
                self._one_by_one(np.flatnonzero(np.bincount(self.column[apart])), begin, work, lead, done, end)
        if since is not None:
            since[self.ports] = np.where(lead > was_free, lead, since[self.ports])
        free[self.ports] = end
        return begin, done

    def divided(self, elsewhere: NDArray[np.bool_]) -> bool:
        """Whether a port holds back some of its messages, and others, which leave room to them, are held back `elsewhere`."""
        some, every = np.logical_or.reduceat(elsewhere, self.first), np.logical_and.reduceat(elsewhere, self.first)
        return bool((some & ~every).any())

    def _one_by_one(self, columns: Ints, begin: Floats, work: Floats, lead: Floats, done: Floats, end: Floats) -> None:
        """Correct `lead`, `done` and `end` where the messages of a port begin at different times."""
        table = self.table(begin, np.inf)[:, columns]
        ends = fair_ends(table, self.table(work, 0.0)[:, columns], self.most)
        lead[columns] = table.min(axis=0)
        end[columns] = np.where(np.isfinite(table), ends, -np.inf).max(axis=0)
        whole = self.table(done, 0.0)
        whole[:, columns] = ends
        done[:] = whole.ravel()[self.cells]

    def table(self, values: Floats, rest: float) -> Floats:
        flat = np.full(self.shape[0] * self.shape[1], rest)
        flat[self.cells] = values
        return flat.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Queued:
    """Messages that may wait for each other at ports, numbered in the order of their first queues."""

    src: Ints
    dst: Ints
    latency: Floats
    notice: Floats
    back: Ints  # the port through which a receiver's request leaves, and
    ahead: Ints  # the one through which it arrives; -1: none
    queue: float  # s of data that it may wait behind in each
    queues: tuple[Queue, ...]
    alone: bool  # every rank sends at most one message and receives at most one
    by_rank: tuple[Ints, Ints] | None  # if every rank sends one and receives one: the messages by sender, and by receiver

    def scaled(self, nbytes: float, free: Ports, doubts: Doubts | None = None) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`. It reads and updates when ports are `free`. If it notes `doubts`, it is exact
        where it has none.
        """
        src, dst, latency, notice = self.src, self.dst, self.latency, self.notice
        words_queue = self.queue > 0 and OUT in free
        by_rank = self.by_rank
        queues = []
        for queue in self.queues:
            since = free[SINCE[queue.key]] if words_queue and queue.key in SINCE else None
            work = queue.work * nbytes
            near = np.maximum(TICK, work * (NEARLY if doubts is None else 0.0))
            queues.append((queue, queue.taking * nbytes, queue.busy * nbytes, work, near, free[queue.key], since))

        def one_round(clock: Floats) -> Floats:
            word = clock[dst]
            if words_queue:
                word += self.standing(word, self.back, free[OUT], free[SINCE[OUT]])
                word += notice
                word += self.standing(word, self.ahead, free[IN], free[SINCE[IN]])
            else:
                word += notice
            head = np.maximum(clock[src], word)
            tail, passed = head.copy(), []
            for queue, taking, busy, work, near, ports, since in queues:
                of = queue.slots
                first, last = queue.serve(head[of], taking, busy, work, near, ports, since)
                if doubts is not None:
                    doubts.met |= bool((first > head[of] + TICK).any())
                if queue.own:
                    first, last = first + latency[of], last + latency[of]
                head[of], tail[of] = first, np.maximum(tail[of], last)
                passed.append((queue, last))
            if doubts is not None:
                doubts.met |= any(queue.divided(last < tail[queue.slots] - TICK) for queue, last in passed)
            left = tail - latency  # a message has one rate from end to end: its slowest port holds back its sender, too
            if by_rank is not None:
                sent, received = by_rank
                return np.asarray(np.maximum(np.maximum(clock, left[sent]), tail[received]))
            after = clock.copy()
            if self.alone:
                after[src] = np.maximum(after[src], left)
                after[dst] = np.maximum(after[dst], tail)
            else:
                np.maximum.at(after, src, left)
                np.maximum.at(after, dst, tail)
            return after

        return one_round

    def standing(self, word: Floats, port: Ints, free: Floats, since: Floats) -> Floats:
        """Seconds that receivers' requests, at their `port` at time `word`, wait behind data that were there before them."""
        behind = np.clip(free[port] - word, 0.0, self.queue)
        return np.where((port >= 0) & (since[port] + TICK < word), behind, 0.0)


Round = Direct | Queued


def make_round(src: Ints, dst: Ints, part: Floats, routes: Routes, *, ranks: int, busy: set[str], queue: float = 0.0) -> Round:
    """The round of these messages. Adds the kinds of ports at which they queue to `busy`, for later rounds.

    Receivers' requests wait behind at most `queue` seconds of data.
    """
    alone = _differ(src) and _differ(dst)
    if alone and all(_differ(stage.port) for stage in routes.stages) and busy.isdisjoint(stage.key for stage in routes.stages):
        return _direct(src, dst, part, routes, ranks)
    busy.update(stage.key for stage in routes.stages)
    return _queued(src, dst, part, routes, alone=alone, ranks=ranks, queue=queue)


def _differ(numbers: Ints) -> bool:
    """Whether no number is there twice."""
    return numbers.size == 0 or int(np.bincount(numbers).max()) == 1


def _direct(src: Ints, dst: Ints, part: Floats, routes: Routes, ranks: int) -> Direct:
    passing = np.zeros(src.size)
    for stage in routes.stages:
        passing[stage.of] = np.maximum(passing[stage.of], part[stage.of] / min(stage.rate, stage.most))
    order = np.argsort(dst)
    src, dst = src[order], dst[order]
    by_sender = _inverse(src) if src.size == ranks else None  # no two share a sender or a receiver
    return Direct(src, dst, passing[order], routes.latency[order], routes.notice[order], by_sender)


def _inverse(permutation: Ints) -> Ints:
    places = np.empty_like(permutation)
    places[permutation] = np.arange(permutation.size)
    return places


def _queued(src: Ints, dst: Ints, part: Floats, routes: Routes, *, alone: bool, ranks: int, queue: float) -> Queued:
    """Numbers messages where they queue first, port by port, so that these queues read and write slices."""
    queues, number = [], np.full(src.size, -1)
    for stage in routes.stages:
        carried = np.bincount(stage.port, minlength=stage.ports)
        ports = np.flatnonzero(carried)
        counts, place = carried[ports], np.cumsum(carried > 0) - 1  # the place of a port among those that carry messages
        order = np.argsort(stage.port, kind="stable")
        of, column = stage.of[order], place[stage.port[order]]
        new = of[number[of] < 0]
        number[new] = np.arange(new.size) + number.max() + 1
        first = np.cumsum(counts) - counts
        row = np.arange(of.size) - first[column]
        stand = Queue(
            key=stage.key,
            ports=_places(ports),
            slots=_places(number[of]),
            column=column,
            first=first,
            each=int(counts[0]) if bool((counts == counts[0]).all()) else 0,
            cells=row * ports.size + column,
            shape=(int(counts.max()), ports.size),
            work=part[of] / stage.rate,
            taking=np.empty(0),
            busy=np.empty(0),
            rate=stage.rate,
            most=min(1.0, stage.most / stage.rate),
            own=new.size == of.size,
        )
        queues.append(_at_once(stand))
    order = _inverse(number)
    src, dst = src[order], dst[order]
    return Queued(
        src=src,
        dst=dst,
        latency=routes.latency[order],
        notice=routes.notice[order],
        back=routes.back[order],
        ahead=routes.ahead[order],
        queue=queue,
        queues=tuple(queues),
        alone=alone,
        by_rank=(_inverse(src), _inverse(dst)) if alone and src.size == ranks else None,
    )


def _at_once(queue: Queue) -> Queue:
    """`queue` with the times of its messages if all arrive at once: longer ones speed up when shorter ones have passed."""
    counts = np.bincount(queue.column)
    if bool((queue.work == queue.work[queue.first][queue.column]).all()):
        taking = queue.work * np.maximum(counts, 1 / queue.most)[queue.column]
        return replace(queue, taking=taking, busy=taking[queue.first])
    come = queue.table(np.zeros(queue.work.size), np.inf)
    ends = fair_ends(come, queue.table(queue.work, 0.0), queue.most)
    return replace(queue, taking=ends.ravel()[queue.cells], busy=np.where(np.isfinite(come), ends, 0.0).max(axis=0))


def _places(numbers: Ints) -> Ints | slice:
    """These places, as a slice if they follow each other: it is read without a copy and written without an index."""
    first, follow = int(numbers[0]), bool((np.diff(numbers) == 1).all())
    return slice(first, first + numbers.size) if follow else numbers
