"""One round of messages, from clocks to clocks: without contention as a few array operations, with it through queues at ports.

What depends on the schedule alone is worked out once, when a program is made; `scaled` adds what depends on the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .routes import Routes, Stage

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ports = dict[str, Floats]  # by kind of port, when each of them is free again
TICK = 1e-12  # s; messages that come closer together come at once, and are served in the order of the schedule


def tick(seconds: Floats) -> Floats:
    """Times as whole ticks: rounding errors must not decide who is first. The odd shift keeps round times off the edges."""
    return np.asarray(np.floor(seconds / TICK + 0.381966))


@dataclass(frozen=True, slots=True)
class Direct:
    """Messages of which no two share a port, a sender or a receiver."""

    src: Ints
    dst: Ints
    leaving: Floats  # s per byte of the buffer, in the sender's port
    passing: Floats  # s per byte of the buffer, in the slowest port
    latency: Floats
    everyone: bool  # all ranks send and receive, and messages are in the order of receivers

    def scaled(self, nbytes: float, _: Ports) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`."""
        src, dst = self.src, self.dst
        leaves, arrives = self.leaving * nbytes, self.passing * nbytes + self.latency
        if self.everyone:
            receiver = np.argsort(src)
            leaves = leaves[receiver]

            def all_ranks(clock: Floats) -> Floats:
                begin = np.maximum(clock[src], clock)
                return np.asarray(np.maximum(begin + arrives, begin[receiver] + leaves))

            return all_ranks

        def some_ranks(clock: Floats) -> Floats:
            begin = np.maximum(clock[src], clock[dst])
            after = clock.copy()
            after[src] = np.maximum(after[src], begin + leaves)
            after[dst] = np.maximum(after[dst], begin + arrives)
            return after

        return some_ranks


@dataclass(frozen=True, slots=True)
class Queue:
    """The ports of one stage, a column each, with their messages of a round; columns are filled up where `real` is false."""

    key: str
    ports: Ints
    slots: Ints
    real: Bools | None  # None: all of them
    seconds: Floats  # per byte of the buffer
    of: Ints
    own: bool  # the sender's own port, before the wire

    def serve(self, head: Floats, tail: Floats, seconds: Floats, spent: Floats, free: Floats) -> None:
        """Let the messages pass, first come first served: `head` and `tail`, when their first and last bytes come, move on.

        `spent` is the sum of `seconds` down each column, for messages that come in the order of the schedule.
        """
        slots, real = self.slots, self.real
        come = head[slots]
        if real is not None:
            come[~real] = np.inf
        if len(come) > 1 and bool((come[1:] < come[:-1] - TICK).any()):
            turn = np.argsort(tick(come), axis=0, kind="stable")
            slots, come = np.take_along_axis(slots, turn, axis=0), np.take_along_axis(come, turn, axis=0)
            seconds = np.take_along_axis(seconds, turn, axis=0)
            real = None if real is None else np.take_along_axis(real, turn, axis=0)
            spent = np.cumsum(seconds, axis=0)
        alone = np.maximum(come + seconds, tail[slots])  # the end, if nobody were before it
        if real is not None:
            alone[~real] = -np.inf
        before = free[self.ports]
        if len(come) > 1:
            end = np.maximum(np.maximum.accumulate(alone - spent, axis=0), before) + spent
        else:
            end = np.maximum(alone, before + seconds)
        free[self.ports] = end[-1]
        if real is None:
            head[slots] = end - seconds
            tail[slots] = end
        else:
            head[slots[real]] = (end - seconds)[real]
            tail[slots[real]] = end[real]


@dataclass(frozen=True, slots=True)
class Queued:
    """Messages that may wait for each other at ports."""

    src: Ints
    dst: Ints
    latency: Floats
    queues: tuple[Queue, ...]
    alone: bool  # every rank sends at most one message and receives at most one

    def scaled(self, nbytes: float, free: Ports) -> Callable[[Floats], Floats]:
        """The round with buffers of `nbytes`; it reads and writes when ports are `free`."""
        src, dst, latency, alone = self.src, self.dst, self.latency, self.alone
        scaled = [(queue, queue.seconds * nbytes) for queue in self.queues]
        queues = [(queue, seconds, np.cumsum(seconds, axis=0), free[queue.key]) for queue, seconds in scaled]

        def one_round(clock: Floats) -> Floats:
            head = np.maximum(clock[src], clock[dst])
            tail = head.copy()
            left = head.copy()
            for queue, seconds, spent, ports in queues:
                queue.serve(head, tail, seconds, spent, ports)
                if queue.own:
                    of = queue.of
                    left[of] = tail[of]
                    head[of] += latency[of]
                    tail[of] += latency[of]
            after = clock.copy()
            if alone:
                after[src] = np.maximum(after[src], left)
                after[dst] = np.maximum(after[dst], tail)
            else:
                np.maximum.at(after, src, left)
                np.maximum.at(after, dst, tail)
            return after

        return one_round


Round = Direct | Queued


def make_round(src: Ints, dst: Ints, part: Floats, routes: Routes, *, ranks: int, busy: set[str]) -> Round:
    """The round of these messages; kinds of ports at which they queue are added to `busy`, for the rounds that come later."""
    alone = np.unique(src).size == src.size and np.unique(dst).size == dst.size
    crowded = {stage.key for stage in routes.stages if np.unique(stage.port).size < stage.of.size}
    if alone and not crowded and busy.isdisjoint(stage.key for stage in routes.stages):
        return _direct(src, dst, part, routes, ranks)
    busy.update(stage.key for stage in routes.stages)
    queues, seen = [], np.zeros(src.size, dtype=bool)
    for stage in routes.stages:
        own = not bool(seen[stage.of].any())
        seen[stage.of] = True
        queues.append(_queue(stage, part, own=own))
    return Queued(src, dst, routes.latency, tuple(queues), alone)


def _direct(src: Ints, dst: Ints, part: Floats, routes: Routes, ranks: int) -> Direct:
    leaving, passing = np.zeros(src.size), np.zeros(src.size)
    for stage in reversed(routes.stages):  # so that a message's first stage is written last
        leaving[stage.of] = part[stage.of] / stage.rate
        passing[stage.of] = np.maximum(passing[stage.of], leaving[stage.of])
    order = np.argsort(dst)
    src, dst = src[order], dst[order]
    everyone = src.size == ranks  # no two share a sender or a receiver
    return Direct(src, dst, leaving[order], passing[order], routes.latency[order], everyone)


def _queue(stage: Stage, part: Floats, *, own: bool) -> Queue:
    ports, counts = np.unique(stage.port, return_counts=True)
    real = np.arange(int(counts.max())) < counts[:, None]
    slots = np.full(real.shape, stage.of[0])
    slots[real] = stage.of[np.argsort(stage.port, kind="stable")]
    seconds = np.where(real, part[slots] / stage.rate, 0.0)
    slots, real, seconds = slots.T.copy(), real.T.copy(), seconds.T.copy()  # a column per port: sums run along whole rows
    return Queue(stage.key, ports, slots, None if bool(real.all()) else real, seconds, stage.of, own)
