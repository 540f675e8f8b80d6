"""One round of messages, from clocks to clocks: without contention as a few array operations, with it through queues at ports.

What depends on the schedule alone is worked out once, when a program is made; `scaled` adds what depends on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .routes import IN, OUT, Routes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Ports = dict[str, Floats]  # by kind of port, when each of them is free again
SINCE = {OUT: "port out, busy since", IN: "port in, busy since"}  # when ports began what they do without a pause
TICK = 1e-12  # s; messages that come closer together come at once, and are served in the order of the schedule


def tick(seconds: Floats) -> Floats:
    """Times as whole ticks: rounding errors must not decide which is first. The odd shift keeps round times off the edges."""
    return np.asarray(np.floor(seconds / TICK + 0.381966))


@dataclass(frozen=True, slots=True)
class Direct:
    """Messages that share no port, sender or receiver with each other."""

    src: Ints
    dst: Ints
    leaving: Floats  # s per byte of the buffer, in the sender's port
    passing: Floats  # s per byte of the buffer, in the slowest port
    latency: Floats
    notice: Floats  # s after the receiver is ready
    everyone: bool  # all ranks send and receive, and messages are in the order of receivers

    def scaled(self, nbytes: float, _: Ports) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`."""
        src, dst, notice = self.src, self.dst, self.notice
        leaves, arrives = self.leaving * nbytes, self.passing * nbytes + self.latency
        if self.everyone:
            receiver = np.argsort(src)
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
    """The ports of one stage with their messages of a round: a table with a column per port, in the order of the schedule."""

    key: str
    ports: Ints | slice
    shape: tuple[int, int]
    slots: Ints | slice  # which messages queue here
    cells: Ints | None  # where they are in the flat table; None: they fill it, one after the other
    seconds: Floats  # per byte of the buffer, by message
    even: bool  # messages of a port take equally long
    own: bool  # the sender's own port, before the wire

    def table(self, values: Floats, cells: Ints | None, rest: float) -> Floats:
        """The values of messages at their `cells`, and `rest` elsewhere."""
        if cells is None:
            return values.reshape(self.shape)
        flat = np.full(self.shape[0] * self.shape[1], rest)
        flat[cells] = values
        return flat.reshape(self.shape)

    def turns(self, come: Floats) -> Ints | None:
        """The cells of messages that `come` then: down each column in the order in which they do."""
        table = self.table(come, self.cells, np.inf)
        if len(table) == 1 or not bool((table[1:] < table[:-1] - TICK).any()):
            return self.cells
        places = np.arange(table.size).reshape(self.shape)
        table = tick(table)
        if len(table) == 2:  # the frequent case, without sorting
            cells = np.where(table[1] < table[0], places[::-1], places)
        else:
            cells = np.empty_like(places)
            np.put_along_axis(cells, np.argsort(table, axis=0, kind="stable"), places, axis=0)
        return cells.ravel() if self.cells is None else cells.ravel()[self.cells]

    def serve(
        self, head: Floats, tail: Floats, seconds: Floats, spent: Floats, free: Floats, since: Floats | None
    ) -> tuple[Floats, Floats]:
        """First come first served: when first and last bytes leave, of messages whose bytes come at `head` and `tail`.

        `spent` is the sum of `seconds` down each column, for messages that come in the order of the schedule. `since`, if it
        matters, is when the ports began what they do without a pause.
        """
        cells = self.turns(head)
        if cells is not self.cells and not self.even:
            spent = down(np.add, self.table(seconds, cells, 0.0))
        alone = self.table(np.maximum(head + seconds, tail), cells, -np.inf)  # the end, if no other were before it
        if len(alone) > 1:
            end = np.maximum(down(np.maximum, alone - spent), free[self.ports]) + spent
        else:
            end = np.maximum(alone, free[self.ports] + spent)
        if since is not None:
            began = end[-1] - spent[-1]
            since[self.ports] = np.where(began > free[self.ports], began, since[self.ports])
        free[self.ports] = end[-1]
        done = end.ravel() if cells is None else end.ravel()[cells]
        return done - seconds, done


def down(running: np.ufunc, table: Floats) -> Floats:
    """Running sums or maxima down the columns. `running.accumulate` goes column by column: long rows are faster one by one."""
    rows, columns = table.shape
    if columns < 32 * rows:  # a row costs what 32 columns do
        return np.asarray(running.accumulate(table, axis=0))
    result = table.copy()
    for above, row in pairwise(result):
        running(above, row, out=row)
    return result


@dataclass(frozen=True, slots=True)
class Queued:
    """Messages that may wait for each other at ports, numbered as they stand in their first queues."""

    src: Ints
    dst: Ints
    latency: Floats
    notice: Floats
    back: Ints  # the port through which a receiver's word leaves, and
    ahead: Ints  # the one through which it comes; -1: none
    queue: float  # s of data that it may stand behind in each
    queues: tuple[Queue, ...]
    alone: bool  # every rank sends at most one message and receives at most one
    everyone: bool  # every rank sends one and receives one

    def scaled(self, nbytes: float, free: Ports) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`; it reads and writes when ports are `free`."""
        src, dst, latency, notice = self.src, self.dst, self.latency, self.notice
        words_queue = self.queue > 0 and OUT in free
        by_rank = (np.argsort(src), np.argsort(dst)) if self.everyone else None
        queues = []
        for queue in self.queues:
            seconds = queue.seconds * nbytes
            spent = down(np.add, queue.table(seconds, queue.cells, 0.0))
            since = free[SINCE[queue.key]] if words_queue and queue.key in SINCE else None
            queues.append((queue, seconds, spent, free[queue.key], since))

        def one_round(clock: Floats) -> Floats:
            word = clock[dst]
            if words_queue:
                word += self.standing(word, self.back, free[OUT], free[SINCE[OUT]])
                word += notice
                word += self.standing(word, self.ahead, free[IN], free[SINCE[IN]])
            else:
                word += notice
            head = np.maximum(clock[src], word)
            tail = head.copy()
            left = head.copy()
            for queue, seconds, spent, ports, since in queues:
                of = queue.slots
                first, last = queue.serve(head[of], tail[of], seconds, spent, ports, since)
                if queue.own:
                    left[of] = last
                    first, last = first + latency[of], last + latency[of]
                head[of], tail[of] = first, last
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
        """Seconds that receivers' words, at their `port` at time `word`, stand behind data that were there before them."""
        behind = np.clip(free[port] - word, 0.0, self.queue)
        return np.where((port >= 0) & (since[port] + TICK < word), behind, 0.0)


Round = Direct | Queued


def make_round(src: Ints, dst: Ints, part: Floats, routes: Routes, *, ranks: int, busy: set[str], queue: float = 0.0) -> Round:
    """The round of these messages; kinds of ports at which they queue are added to `busy`, for the rounds that come later.

    Receivers' words stand behind at most `queue` seconds of data.
    """
    alone = np.unique(src).size == src.size and np.unique(dst).size == dst.size
    crowded = {stage.key for stage in routes.stages if np.unique(stage.port).size < stage.of.size}
    if alone and not crowded and busy.isdisjoint(stage.key for stage in routes.stages):
        return _direct(src, dst, part, routes, ranks)
    busy.update(stage.key for stage in routes.stages)
    return _queued(src, dst, part, routes, alone=alone, ranks=ranks, queue=queue)


def _direct(src: Ints, dst: Ints, part: Floats, routes: Routes, ranks: int) -> Direct:
    leaving, passing = np.zeros(src.size), np.zeros(src.size)
    for stage in reversed(routes.stages):  # so that a message's first stage is written last
        leaving[stage.of] = part[stage.of] / stage.rate
        passing[stage.of] = np.maximum(passing[stage.of], leaving[stage.of])
    order = np.argsort(dst)
    src, dst = src[order], dst[order]
    everyone = src.size == ranks  # no two share a sender or a receiver
    return Direct(src, dst, leaving[order], passing[order], routes.latency[order], routes.notice[order], everyone)


def _queued(src: Ints, dst: Ints, part: Floats, routes: Routes, *, alone: bool, ranks: int, queue: float) -> Queued:
    """Messages get their numbers where they queue first, from cell to cell: what these queues read and write is then a slice."""
    queues, number = [], np.full(src.size, -1)
    for stage in routes.stages:
        ports, shape, cells = _cells(stage.port)
        order = np.argsort(cells)
        of, cells = stage.of[order], cells[order]
        new = of[number[of] < 0]
        number[new] = np.arange(new.size) + number.max() + 1
        seconds = part[of] / stage.rate
        stand = Queue(
            key=stage.key,
            ports=_places(ports),
            shape=shape,
            slots=_places(number[of]),
            cells=None if of.size == shape[0] * shape[1] else cells,
            seconds=seconds,
            even=bool((seconds == seconds[cells % ports.size]).all()),
            own=new.size == of.size,
        )
        queues.append(stand)
    order = np.argsort(number)
    return Queued(
        src=src[order],
        dst=dst[order],
        latency=routes.latency[order],
        notice=routes.notice[order],
        back=routes.back[order],
        ahead=routes.ahead[order],
        queue=queue,
        queues=tuple(queues),
        alone=alone,
        everyone=alone and src.size == ranks,
    )


def _cells(port: Ints) -> tuple[Ints, tuple[int, int], Ints]:
    """The ports of messages, the shape of their table, and the cell in it that each message has."""
    ports, column, counts = np.unique(port, return_inverse=True, return_counts=True)
    row = np.empty_like(column)
    row[np.argsort(column, kind="stable")] = np.arange(port.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return ports, (int(counts.max()), ports.size), row * ports.size + column


def _places(numbers: Ints) -> Ints | slice:
    """These places, as a slice if they follow each other: it is read without a copy and written without an index."""
    first, follow = int(numbers[0]), bool((np.diff(numbers) == 1).all())
    return slice(first, first + numbers.size) if follow else numbers
