"""Lower bounds on the time of a compiled schedule: as if no message waited for another, and the load of its busiest port.

`simulate.run` finds no time below either. A message that shares a port ends no earlier than it would alone, and clocks only
enter through sums and maxima. A port carries no more than its rate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .program import Moves, Phase, Program
from .rounds import Direct, Queued
from .simulate import run

Floats = NDArray[np.float64]


def crowded(program: Program) -> bool:
    """Whether messages may wait for each other at ports, which makes a simulation slow."""
    return any(isinstance(phase, Moves) and isinstance(phase.one, Queued) for phase in program.phases)


def least_of(program: Program, sizes: Floats) -> Floats:
    """A lower bound on the seconds of `program`, by size of the buffer in bytes."""
    alone = replace(program, phases=tuple(map(_alone, program.phases)), ports=())
    uncontended = [run(alone, float(size)).seconds for size in sizes]
    return np.maximum(uncontended, _busiest(program) * sizes)


def _alone(phase: Phase) -> Phase:
    """`phase` as if each message had all of its ports to itself."""
    if not isinstance(phase, Moves) or not isinstance(phase.one, Queued):
        return phase
    one = phase.one
    passing, entered = np.zeros(one.src.size), np.zeros(one.src.size, dtype=bool)
    for queue in one.queues:
        passing[queue.slots] = np.maximum(passing[queue.slots], queue.work / queue.most)
        entered[queue.slots] |= queue.own
    if not entered.all():  # a message does not pass its sender's own port: no bound for this phase
        return replace(phase, rounds=0)
    return replace(phase, one=Direct(one.src, one.dst, passing, one.latency, one.notice, by_sender=None))


def _busiest(program: Program) -> float:
    """Seconds per byte of the buffer for which the busiest port is busy."""
    carried = {key: np.zeros(count) for key, count in program.ports}
    for phase in program.phases:
        if isinstance(phase, Moves) and isinstance(phase.one, Queued):
            for queue in phase.one.queues:
                carried[queue.key][queue.ports] += phase.rounds * np.bincount(queue.column, weights=queue.work)
    return max((float(ports.max()) for ports in carried.values() if ports.size), default=0.0)
