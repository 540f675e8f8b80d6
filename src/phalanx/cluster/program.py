"""A schedule as arrays, which a simulator of thousands of ranks reads instead of a million `Move` objects.

A `Collective` is not lowered message by message. Its ring sends along the same edges in every round, so a step of collectives is
one `Moves` with `rounds`; reduce and broadcast are chains. Only steps that mix sizes or kinds go through `lower`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule import Collective, Kind, Move, Schedule, Step, lower

from .machine import Cluster, ClusterError
from .profile import BackendProfile, CallGroup
from .rounds import SINCE, Round, make_round
from .routes import port_of, route, share

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moves:
    """Messages that leave together, `rounds` times. `software` is the time that a rank spends on them before they leave."""

    label: str
    one: Round
    rounds: int
    software: Floats  # s, by rank


@dataclass(frozen=True, slots=True)
class Call:
    """One library call by each row of `groups`, on `part` of the buffer."""

    label: str
    kind: Kind
    groups: Ints
    part: Floats
    group: CallGroup


Phase = Moves | Call


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule on a cluster with a backend, ready to be run for any number of bytes."""

    name: str
    cluster: Cluster
    profile: BackendProfile
    phases: tuple[Phase, ...]
    ports: tuple[tuple[str, int], ...]  # kinds of ports at which messages queue, and how many there are

    @property
    def messages(self) -> int:
        """How many messages a run simulates. A call counts as the messages of its lowered ring."""
        count = 0
        for phase in self.phases:
            if isinstance(phase, Moves):
                count += phase.one.src.size * phase.rounds
            else:
                rows, size = phase.groups.shape
                count += rows * (size - 1) * {"all_reduce": 2 * size, "reduce": 1, "broadcast": 1}.get(phase.kind, size)
        return count


def connections(program: Program) -> int:
    """The most connections to other hosts that one port carries, for messages only: library calls do not count."""
    ranks = program.cluster.ranks
    pairs = [np.unique(phase.one.src * ranks + phase.one.dst) for phase in program.phases if isinstance(phase, Moves)]
    if not pairs:
        return 0
    src, dst = np.divmod(np.unique(np.concatenate(pairs)), ranks)
    crossing = src // program.cluster.per_host != dst // program.cluster.per_host
    return int(np.bincount(port_of(program.cluster, src[crossing]), minlength=1).max())


def compile_schedule(schedule: Schedule, cluster: Cluster, profile: BackendProfile, *, code: float = 1.0) -> Program:
    """`schedule` as arrays, with the routes of its messages on `cluster`. Encoded chunks have `code` times their length."""
    if schedule.world != cluster.ranks:
        raise ClusterError(
            f"{schedule.name} is for {schedule.world} ranks, cluster {cluster.name} has {cluster.ranks}"
            f" ({cluster.hosts} hosts of {cluster.per_host}); give equal numbers"
        )
    compiler = _Compiler(schedule, cluster, profile, code)
    phases = [phase for step in schedule.steps for phase in compiler.phases(step)]
    return Program(schedule.name, cluster, profile, tuple(phases), tuple(sorted(compiler.ports.items())))


class _Compiler:
    """Turns steps into phases, in order: whether messages must queue depends on the steps before."""

    def __init__(self, schedule: Schedule, cluster: Cluster, profile: BackendProfile, code: float) -> None:
        self.schedule, self.cluster, self.profile, self.code = schedule, cluster, profile, code
        self.busy: set[str] = set()
        self.ports: dict[str, int] = {}

    def phases(self, step: Step) -> Iterator[Phase]:
        ops = [op for op in step.ops if isinstance(op, (Move, Collective))]  # scaling and encoding take no time on a wire
        if not ops:
            return
        chunks = self.schedule.chunks
        if all(isinstance(op, Move) for op in ops):
            moves = cast("list[Move]", ops)
            src, dst = np.array([m.src for m in moves]), np.array([m.dst for m in moves])
            yield self._moves(step.label, src, dst, np.array([m.count * (self.code if m.coded else 1.0) for m in moves]) / chunks)
            return
        if all(isinstance(op, Collective) for op in ops):
            collectives = cast("list[Collective]", ops)
            if len({(c.kind, len(c.group)) for c in collectives}) == 1:
                groups = np.array([c.group for c in collectives])
                part = np.array([len(c.chunks) for c in collectives]) / chunks
                yield from self._collective(step.label, collectives[0].kind, groups, part)
                return
        for lowered in lower(replace(self.schedule, steps=(step,))).steps:
            yield from self.phases(lowered)

    def _collective(self, label: str, kind: Kind, groups: Ints, part: Floats) -> Iterator[Phase]:
        size = groups.shape[1]
        if size == 1:
            return
        group, calls = share(self.cluster, groups), self.profile.calls
        if calls == "always" or (calls == "on one host" and bool((group.hosts == 1).all())):
            yield Call(label, kind, groups, part, group)
        elif kind == "reduce":
            for i in reversed(range(1, size)):
                yield self._moves(label, groups[:, i], groups[:, i - 1], part)
        elif kind == "broadcast":
            for i in range(1, size):
                yield self._moves(label, groups[:, i - 1], groups[:, i], part)
        else:
            following = np.roll(groups, -1, axis=1)
            rounds = (size - 1) * (2 if kind == "all_reduce" else 1)
            yield self._moves(label, groups.ravel(), following.ravel(), np.repeat(part / size, size), rounds)

    def _moves(self, label: str, src: Ints, dst: Ints, part: Floats, rounds: int = 1) -> Moves:
        routes = route(self.cluster, self.profile, src, dst)
        self.ports.update((stage.key, stage.ports) for stage in routes.stages)
        if self.profile.lanes > 1:  # pieces of one buffer meet at every port
            self.busy.update(stage.key for stage in routes.stages)
        software = np.zeros(self.cluster.ranks)
        np.add.at(software, src, routes.software / 2)  # so a rank of a ring, which sends one and receives one, is busy with one
        np.add.at(software, dst, routes.software / 2)
        queue = self.profile.queue
        one = make_round(src, dst, part, routes, ranks=self.cluster.ranks, busy=self.busy, queue=queue)
        if queue:
            self.ports.update((since, self.ports[key]) for key, since in SINCE.items() if key in self.ports)
        return Moves(label, one, rounds, software)
