"""The price of a small program, event by event: from one event to the next, every message has its max-min fair rate.

Messages divide a port also if they are of different steps. If another port holds one of them back, the others use what it leaves.
Pricing in rounds (`rounds.py`) does neither, but it is faster: an event takes 0.1 to 0.2 ms, and where ranks advance unevenly,
every message is an event of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Moves, Program
from .rounds import Queued

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SAME = 1e-9  # relative; rates and times that differ by less differ by rounding only
NOWHERE = 0  # a port of infinite rate


def run_events(program: Program, nbytes: float, start: Floats) -> Floats:
    """When every rank has finished every phase, a row per phase, if ranks begin at `start`.

    The program has messages only, no library calls. Buffers go through it in one piece, and requests wait behind no data.
    """
    messages = _messages(program)
    first = float(start.min())
    ranks = _Ranks(messages, start - first, len(program.phases))  # near zero, so that rounding is small
    left, active, now = messages.size * nbytes, np.empty(0, dtype=np.int64), 0.0
    while active.size or ranks.coming:
        rate = fair_rates(messages.ports[active], messages.rates)
        takes = left[active] / rate
        before, now = now, min(now + takes.min(initial=inf), ranks.coming[0][0] if ranks.coming else inf)
        left[active] -= (now - before) * rate
        passed = takes <= now - before + SAME * now
        for message in active[passed].tolist():
            ranks.finish(message, now)
        active = np.concatenate((active[~passed], np.array(ranks.begin(now * (1 + SAME)), dtype=np.int64)))
    return np.asarray(np.maximum.accumulate(np.maximum(ranks.ends + first, start)))


def fair_rates(ports: Ints, rates: Floats) -> Floats:
    """Max-min fair bytes/s of messages, which pass a row of `ports` each. `rates` has what the ports carry.

    A port that offers each of its messages no more than their other ports do decides their rates. Then the others divide what is
    left. Many ports decide at a time, so this takes a few rounds only.
    """
    found, room, rest = np.empty(len(ports)), rates.copy(), np.arange(len(ports))
    while rest.size:
        passing = ports[rest]
        users = np.bincount(passing.ravel(), minlength=rates.size)
        offer = (room / np.maximum(users, 1))[passing]
        least = offer.min(axis=1)
        tight = offer <= least[:, None] * (1 + SAME)
        decides = np.bincount(passing.ravel(), tight.ravel(), rates.size) == users
        decided = (tight & decides[passing]).any(axis=1)
        found[rest[decided]] = least[decided]
        room -= np.bincount(passing[decided].ravel(), np.repeat(least[decided], ports.shape[1]), rates.size)
        rest = rest[~decided]
    return found


@dataclass(frozen=True, slots=True)
class _Messages:
    """All messages of a program. Those of one round have the same `step`."""

    step: Ints
    src: Ints
    dst: Ints
    size: Floats  # per byte of the buffer
    latency: Floats
    notice: Floats
    ports: Ints  # a row per message
    rates: Floats  # by port
    phase: list[int]  # by step
    software: list[Floats]  # by step and rank


def _messages(program: Program) -> _Messages:
    counts = dict(program.ports)
    begin = dict(zip(counts, np.cumsum([1, *counts.values()])))
    column = {key: i for i, key in enumerate(counts)}
    rates = [np.full(1 + sum(counts.values()), inf)]
    rounds: list[tuple[NDArray[Any], ...]] = []
    of_phase, software = [], []
    for number, phase in enumerate(program.phases):
        assert isinstance(phase, Moves)
        one = phase.one
        ports = np.full((one.src.size, len(counts)), NOWHERE)
        if isinstance(one, Queued):
            size = np.zeros(one.src.size)
            for queue in one.queues:
                port = begin[queue.key] + np.arange(counts[queue.key])[queue.ports][queue.column]
                ports[queue.slots, column[queue.key]] = port
                rates[0][port], size[queue.slots] = queue.rate, queue.work * queue.rate
        else:  # they meet nobody: a port for each, with a size of as many seconds as it takes
            ports[:, 0], size = sum(map(len, rates)) + np.arange(one.src.size), one.passing
            rates.append(np.ones(one.src.size))
        for _ in range(phase.rounds):
            rounds.append((np.full(one.src.size, len(rounds)), one.src, one.dst, size, one.latency, one.notice, ports))
            of_phase.append(number)
            software.append(phase.software)
    step, src, dst, size, latency, notice, ports = (np.concatenate(field) for field in zip(*rounds))
    return _Messages(step, src, dst, size, latency, notice, ports, np.concatenate(rates), of_phase, software)


class _Ranks:
    """Who waits for whom. A rank's turn is a step in which it takes part; it ends with the last of its messages."""

    def __init__(self, messages: _Messages, clock: Floats, phases: int) -> None:
        self.step, self.src, self.dst = messages.step.tolist(), messages.src.tolist(), messages.dst.tolist()
        self.latency, self.notice = messages.latency.tolist(), messages.notice.tolist()
        self.phase, self.software = messages.phase, messages.software
        self.ends = np.full((phases, clock.size), -inf)  # of ranks that take part in a phase
        self.coming: list[tuple[float, int]] = []  # a heap: when both ranks of a message are ready, and which it is
        self.ready = [-inf] * len(self.src)  # when the last rank so far came to this message
        self.unready = [2] * len(self.src)  # how many ranks have not
        self.clock = clock.tolist()  # the end of a rank's last turn
        self.latest = clock.tolist()  # the end of its last message
        self.turns: list[list[list[int]]] = [[] for _ in self.clock]  # by rank, those to come, last first: their messages
        for message in reversed(range(len(self.src))):
            for rank in (self.src[message], self.dst[message]):
                turns = self.turns[rank]
                if turns and self.step[turns[-1][0]] == self.step[message]:
                    turns[-1].append(message)
                else:
                    turns.append([message])
        self.open = [0] * len(self.clock)  # messages of a rank's turn that have not ended
        for rank in range(len(self.clock)):
            self._next_turn(rank)

    def _next_turn(self, rank: int) -> None:
        if not self.turns[rank]:
            return
        messages = self.turns[rank].pop()
        self.open[rank] = len(messages)
        at = self.clock[rank] + float(self.software[self.step[messages[0]]][rank])
        for message in messages:
            self.ready[message] = max(self.ready[message], at + (self.notice[message] if rank == self.dst[message] else 0.0))
            self.unready[message] -= 1
            if self.unready[message] == 0:
                heappush(self.coming, (self.ready[message], message))

    def begin(self, until: float) -> list[int]:
        """The messages that begin now: no later than `until`."""
        begun = []
        while self.coming and self.coming[0][0] <= until:
            begun.append(heappop(self.coming)[1])
        return begun

    def finish(self, message: int, now: float) -> None:
        """The message has left its sender. It arrives a latency later."""
        for rank, end in ((self.src[message], now), (self.dst[message], now + self.latency[message])):
            self.latest[rank] = max(self.latest[rank], end)
            self.open[rank] -= 1
            if self.open[rank] == 0:
                self.clock[rank] = self.latest[rank]
                self.ends[self.phase[self.step[message]], rank] = self.clock[rank]
                self._next_turn(rank)
