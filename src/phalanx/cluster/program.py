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

from phalanx.schedule import Collective, Kind, Move, Schedule, lower

from .machine import Cluster, ClusterError
from .profile import BackendProfile, CallGroup
from .rounds import SINCE, Round, make_round
from .routes import Routes, contended, distinct, port_of, route, share

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
    pairs = [distinct(phase.one.src * ranks + phase.one.dst) for phase in program.phases if isinstance(phase, Moves)]
    if not pairs:
        return 0
    src, dst = np.divmod(distinct(np.concatenate(pairs)), ranks)
    crossing = src // program.cluster.per_host != dst // program.cluster.per_host
    return int(np.bincount(port_of(program.cluster, src[crossing]), minlength=1).max())


@dataclass(frozen=True, slots=True)
class Messages:
    """The moves of a step, as arrays. `chunks` of each are sent, and some of them are `coded`."""

    label: str
    src: Ints
    dst: Ints
    chunks: Ints
    coded: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a step, of one kind and size, as arrays: one per row of `groups`, on `chunks` of the buffer."""

    label: str
    kind: Kind
    groups: Ints
    chunks: Ints


@dataclass(frozen=True, slots=True)
class Flat:
    """A schedule as arrays, not yet on a cluster. To compile one for several clusters, flatten it first: it has many moves."""

    name: str
    world: int
    chunks: int
    steps: tuple[Messages | Collectives, ...]


def flatten(schedule: Schedule) -> Flat:
    """`schedule` as arrays. Steps that mix sizes or kinds become messages."""
    return Flat(schedule.name, schedule.world, schedule.chunks, tuple(_flat_steps(schedule)))


def _flat_steps(schedule: Schedule) -> Iterator[Messages | Collectives]:
    for step in schedule.steps:
        ops = [op for op in step.ops if isinstance(op, (Move, Collective))]  # scaling and encoding take no time on a wire
        if set(map(type, ops)) <= {Move}:
            moves = cast("list[Move]", ops)
            if moves:
                src, dst = np.array([move.src for move in moves]), np.array([move.dst for move in moves])
                chunks, coded = np.array([move.count for move in moves]), np.array([move.coded for move in moves])
                yield Messages(step.label, src, dst, chunks, coded)
            continue
        if len({(op.kind, len(op.group)) if isinstance(op, Collective) else None for op in ops}) == 1:
            collectives = cast("list[Collective]", ops)
            groups, chunks = np.array([c.group for c in collectives]), np.array([len(c.chunks) for c in collectives])
            yield Collectives(step.label, collectives[0].kind, groups, chunks)
        else:
            yield from _flat_steps(lower(replace(schedule, steps=(step,))))


def compile_schedule(schedule: Schedule | Flat, cluster: Cluster, profile: BackendProfile, *, code: float = 1.0) -> Program:
    """`schedule` as arrays, with the routes of its messages on `cluster`. Encoded chunks have `code` times their length."""
    if schedule.world != cluster.ranks:
        raise ClusterError(
            f"{schedule.name} is for {schedule.world} ranks, cluster {cluster.name} has {cluster.ranks}"
            f" ({cluster.hosts} hosts of {cluster.per_host}); give equal numbers"
        )
    flat = schedule if isinstance(schedule, Flat) else flatten(schedule)
    drafting = _Drafting(flat.chunks, cluster, profile, code)
    drafts = [draft for step in flat.steps for draft in drafting.drafts(step)]
    sends = [draft for draft in drafts if isinstance(draft, _Sends)]
    ports = {stage.key: stage.ports for draft in sends for stage in draft.routes.stages}
    # pieces of one buffer meet at every port
    busy = set(ports) if profile.lanes > 1 else contended((draft.src, draft.dst, draft.routes) for draft in sends)
    phases = [draft if isinstance(draft, Call) else draft.moves(cluster.ranks, busy, profile.queue) for draft in drafts]
    if profile.queue:
        ports.update((since, ports[key]) for key, since in SINCE.items() if key in ports)
    return Program(flat.name, cluster, profile, tuple(phases), tuple(sorted(ports.items())))


@dataclass(frozen=True, slots=True)
class _Sends:
    """Messages of a step with their routes. Whether they must queue depends on those of all other steps."""

    label: str
    src: Ints
    dst: Ints
    part: Floats
    rounds: int
    routes: Routes

    def moves(self, ranks: int, busy: set[str], queue: float) -> Moves:
        software = np.zeros(ranks)
        np.add.at(software, self.src, self.routes.software / 2)  # so a rank of a ring, which sends one and receives one,
        np.add.at(software, self.dst, self.routes.software / 2)  # is busy with one
        one = make_round(self.src, self.dst, self.part, self.routes, ranks=ranks, busy=busy, queue=queue)
        return Moves(self.label, one, self.rounds, software)


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Turns steps into library calls and messages."""

    chunks: int
    cluster: Cluster
    profile: BackendProfile
    code: float

    def drafts(self, step: Messages | Collectives) -> Iterator[_Sends | Call]:
        if isinstance(step, Messages):
            part = step.chunks * np.where(step.coded, self.code, 1.0) / self.chunks
            yield self._sends(step.label, step.src, step.dst, part)
        else:
            yield from self._collective(step.label, step.kind, step.groups, step.chunks / self.chunks)

    def _collective(self, label: str, kind: Kind, groups: Ints, part: Floats) -> Iterator[_Sends | Call]:
        size = groups.shape[1]
        if size == 1:
            return
        group, calls = share(self.cluster, groups), self.profile.calls
        if calls == "always" or (calls == "on one host" and bool((group.hosts == 1).all())):
            yield Call(label, kind, groups, part, group)
        elif kind == "reduce":
            for i in reversed(range(1, size)):
                yield self._sends(label, groups[:, i], groups[:, i - 1], part)
        elif kind == "broadcast":
            for i in range(1, size):
                yield self._sends(label, groups[:, i - 1], groups[:, i], part)
        else:
            following = np.roll(groups, -1, axis=1)
            rounds = (size - 1) * (2 if kind == "all_reduce" else 1)
            yield self._sends(label, groups.ravel(), following.ravel(), np.repeat(part / size, size), rounds)

    def _sends(self, label: str, src: Ints, dst: Ints, part: Floats, rounds: int = 1) -> _Sends:
        return _Sends(label, src, dst, part, rounds, route(self.cluster, self.profile, src, dst))
