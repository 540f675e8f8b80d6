"""The price of a schedule on a cluster: a clock per rank, ports that messages share, no barrier between steps.

A message begins when its sender and its receiver have finished their previous step. With a rendezvous, it begins when the
receiver's request has reached the sender. It passes all ports on its way at once, at one rate. Messages share a port fairly, as
TCP and InfiniBand do. Pieces of one buffer take turns: most of them share a connection.

Arrays price one round after the other, and look at one port after the other. They note doubts where this is not exact: if
messages of different rounds met, which take turns here, or if the rates of messages depended on each other. With doubts, a
program is priced event by event, if it is small and its profile has nothing that events do not know.

Every round is a function of maxima and sums, so adding a constant to all clocks adds it to the result. This allows an exact
shortcut: once a round has moved all clocks by the same amount, all later rounds of the same messages will, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule import Schedule

from .events import run_events
from .machine import Cluster
from .profile import PLAIN, BackendProfile, call_seconds
from .program import Call, Moves, Program, compile_schedule
from .rounds import SINCE, Doubts, Ports, Queued, Round

Floats = NDArray[np.float64]
# Messages of a program that is priced event by event, where each takes up to 0.2 ms: of one program, and of one of the hundreds
# that a plan compares. With 10,000 in a plan, one for 128 ranks took 92 s instead of 4.
MOST_BY_EVENTS, MOST_IN_A_PLAN = 10_000, 2_000
SAME = 1e-12  # relative; clocks that differ by less have moved equally


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every rank had finished every phase: `clocks[i]` before phase i, by rank, in seconds."""

    name: str
    labels: tuple[str, ...]
    clocks: Floats  # (phases + 1, ranks)
    messages: int

    @property
    def begin(self) -> Floats:
        return np.asarray(self.clocks[0])

    @property
    def end(self) -> Floats:
        return np.asarray(self.clocks[-1])

    @property
    def seconds(self) -> float:
        """From the start of the first rank to the end of the last."""
        return float(self.end.max() - self.begin.min())

    def by_label(self) -> dict[str, float]:
        """Seconds that the last rank's clock moved in each kind of phase, in order; they add up to the whole."""
        moved: dict[str, float] = {}
        latest = self.clocks.max(axis=1)
        for label, before, after in zip(self.labels, latest, latest[1:]):
            moved[label] = moved.get(label, 0.0) + float(after - before)
        return moved


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    nbytes: float,
    *,
    profile: BackendProfile = PLAIN,
    start: Floats | None = None,
    shortcut: bool = True,
    code: float = 1.0,
) -> Timeline:
    """`schedule` with buffers of `nbytes` on `cluster`, where ranks begin at `start`. Encoded bytes are `code` times as many.

    `shortcut=False` computes every round of every ring, to measure or to check the simulator itself.
    """
    program = compile_schedule(schedule, cluster, profile, code=code)
    return run(program, nbytes, start=start, shortcut=shortcut, most_by_events=MOST_BY_EVENTS)


def run(
    program: Program,
    nbytes: float,
    *,
    start: Floats | None = None,
    ports: Ports | None = None,
    shortcut: bool = True,
    most_by_events: int = MOST_IN_A_PLAN,
) -> Timeline:
    """The timeline of a compiled schedule. `ports` has when the run before frees the ports; it is updated for the next run.

    A program with more messages than `most_by_events` is priced round by round. So is any with `ports`, because events cannot
    continue an earlier run.
    """
    if nbytes < 0:
        raise ValueError(f"simulate {program.name}: {nbytes} bytes; give at least 0")
    clock = np.zeros(program.cluster.ranks) if start is None else np.array(start, dtype=np.float64)
    if clock.shape != (program.cluster.ranks,):
        raise ValueError(
            f"simulate {program.name}: start has shape {clock.shape}; give one time per rank, {program.cluster.ranks}"
        )
    labels, clocks, pieces = tuple(phase.label for phase in program.phases), [clock], 1
    if any(isinstance(phase, Moves) for phase in program.phases):
        clock, pieces = clock + program.profile.start, program.profile.pieces(nbytes)
    free = {} if ports is None else ports
    for key, count in program.ports:
        free.setdefault(key, np.full(count, clock.min()))
    by_events = ports is None and pieces == 1 and program.messages <= most_by_events and _for_events(program)
    doubts = Doubts() if by_events else None
    state = _State([clock] * pieces, clock, free)
    for phase in program.phases:
        if isinstance(phase, Call):
            _call(phase, program.profile, state, nbytes / pieces)
        else:
            _moves(phase, state, nbytes / pieces, doubts, shortcut=shortcut)
        clocks.append(np.maximum.reduce(state.lanes))
        if doubts is not None and doubts.met:
            return Timeline(program.name, labels, np.array([clocks[0], *run_events(program, nbytes, clock)]), program.messages)
    return Timeline(program.name, labels, np.array(clocks), program.messages)


def _for_events(program: Program) -> bool:
    """Whether `run_events` knows all that this program and its profile have."""
    return all(isinstance(phase, Moves) for phase in program.phases) and program.profile.queue == 0


@dataclass(slots=True)
class _State:
    """The state of a run: when each piece of the buffer ended its last step on each rank, when ranks and ports are free.

    Pieces go through the schedule one behind the other: a rank begins a step with a piece when that piece has finished the step
    before, and the piece before has begun this one. The software of a message keeps the rank busy; the wire does not.
    """

    lanes: list[Floats]
    begun: Floats
    free: Ports


def _call(phase: Call, profile: BackendProfile, state: _State, nbytes: float) -> None:
    """A library call begins when the last of its group has arrived, and ends for all at once. A rank does one at a time."""
    seconds = call_seconds(profile, phase.kind, phase.group, phase.part * nbytes)
    for lane, clock in enumerate(state.lanes):
        after = np.maximum(clock, state.begun)
        after[phase.groups] = (after[phase.groups].max(axis=1) + seconds)[:, None]
        state.lanes[lane] = state.begun = after


def _moves(phase: Moves, state: _State, nbytes: float, doubts: Doubts | None, *, shortcut: bool) -> None:
    one_round = phase.one.scaled(nbytes, state.free, doubts)
    keys = (*(queue.key for queue in phase.one.queues), *SINCE.values()) if isinstance(phase.one, Queued) else ()
    watched = [state.free[key] for key in keys if key in state.free]
    for done in range(1, phase.rounds + 1):
        look = shortcut and done < phase.rounds and (done <= 3 or done % 8 == 0)
        before = [ports.copy() for ports in watched] if look else []
        lanes, begun = list(state.lanes), state.begun
        for lane, clock in enumerate(lanes):
            begin = (np.maximum(clock, state.begun) if len(lanes) > 1 else clock) + phase.software
            state.lanes[lane], state.begun = one_round(begin), begin
        if look:
            moved = [after - clock for after, clock in zip((*state.lanes, state.begun), (*lanes, begun))]
            pace = _pace(phase.one, moved if len(lanes) > 1 else moved[:1], [now - then for now, then in zip(watched, before)])
            if pace is not None:
                left = (phase.rounds - done) * pace
                taking_part = np.union1d(phase.one.src, phase.one.dst)
                for clock in (*state.lanes, state.begun) if len(lanes) > 1 else state.lanes:
                    clock[taking_part] += left
                for now, then in zip(watched, before):
                    now[now > then] += left
                return


def _pace(one: Round, moved: list[Floats], ports: list[Floats]) -> float | None:
    """How far a round has moved the clocks of all that take part, ports included, or None if they differ."""
    pace = float(max(clock.max() for clock in moved))
    taking_part = [part for clock in moved for part in (clock[one.src], clock[one.dst])]
    taking_part += [port[port > 0] for port in ports]
    return pace if all(bool((np.abs(part - pace) <= SAME * pace).all()) for part in taking_part) else None
