"""The communicator: MPI's verbs on tensors and plain objects, with a bounded wait and an error that names who is missing.

Every verb checks its arguments in the calling thread, then becomes one numbered operation on the issuing thread. The all-reduce
runs a schedule; the others are a few messages each. The verbs are in layers, one story each: `operations`, `reductions`,
`messages`, `objects`; here a communicator is made, split and closed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from phalanx.comm.choose import for_world
from phalanx.comm.failure import Watch
from phalanx.comm.hosts import Hosts
from phalanx.comm.hotline import Answer, Hotline
from phalanx.comm.issuer import Issuer
from phalanx.comm.loans import Loans
from phalanx.comm.objects import Objects
from phalanx.comm.reductions import scattering
from phalanx.comm.transports import Transport
from phalanx.comm.transports.shared import SharedTransport
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule

Share = Callable[[str, int, int], HostTeam | None]  # (name, rank and size on this host) -> shared memory, where it is possible


class Communicator(Objects):
    """A set of ranks that communicate; made by `create_communicator`, `run_local` or `split`."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        me: int,
        transport: Transport,
        issuer: Issuer,
        watch: Watch | None,
        keys: Sequence[str],
        algorithm: Schedule | None,
        *,
        parent: Communicator | None = None,
        share: Share | None = None,
    ) -> None:
        super().__init__(name, ranks, me, transport, issuer, watch, keys, parent=parent)
        self._splits = 0
        self._algorithm, self._share = algorithm, share
        self._ready(algorithm, shared=self._share_memory())  # on all hosts, so that all ranks run one schedule

    def __repr__(self) -> str:
        return f"<Communicator {self._name}: rank {self.rank} of {self.size}, {self.inter_size} host(s), {self.schedule.name}>"

    def _share_memory(self) -> bool:
        """Make shared memory with the ranks of this host, and tell whether that worked on all hosts."""
        if self._share is None or max(len(ranks) for ranks in self._hosts.ranks) == 1:
            return False
        team = None
        if self.intra_size > 1:
            team = self._share(f"{self._name}/{self._inter_rank}", self._intra_rank, self.intra_size)
        works = team is not None or self.intra_size == 1
        if self.inter_size > 1:
            works = all(self.allgather_obj(works))
        if team is not None and not works:
            team.close()
        elif team is not None:
            host = [self._ranks[rank] for rank in self._hosts.ranks[self._inter_rank]]
            self._team, self._transport = team, SharedTransport(self._transport, team, host)
            self._loans = Loans(team)
            if self._watch is not None:
                self._watch.interrupts.append(team.abort)
            # of this rank alone, at `close` or when the communicator is dropped: the others may still be at work with theirs
            self._leave = weakref.finalize(self, _leave_team, team, self._watch, os.getpid())
            self._leave.atexit = False  # at exit the order of things is close()'s affair
        return works

    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same `color`, ordered by `key`, then by rank; it keeps this one's options."""
        if not isinstance(color, int) or not isinstance(key, int):
            raise TypeError(f"split wants ints, got color {color!r} and key {key!r}")
        color, key = int(color), int(key)  # True is 1, also in the name by which the new ranks find each other
        table = self.allgather_obj((color, key))
        self._splits += 1
        members = {
            other: sorted((rank for rank in range(self.size) if table[rank][0] == other), key=lambda rank: (table[rank][1], rank))
            for other in sorted({other for other, _ in table})
        }
        ranks = {other: [self._ranks[rank] for rank in own] for other, own in members.items()}
        keys = {other: [self._keys[rank] for rank in own] for other, own in members.items()}
        algorithm = self._algorithm if len(members) == 1 else None  # a schedule is for one world size
        if self._parent is None and self._transport.library:
            # NCCL's groups are made by all ranks of the world together, so only here; deeper splits run as Moves
            for other in members:
                prepare(self._transport, ranks[other], algorithm or for_world(Hosts.of(keys[other]), library=True))
        return Communicator(
            f"{self._name}.{self._splits}.{color}",
            ranks[color],
            members[color].index(self.rank),
            self._transport,
            self._issuer,
            self._watch,
            keys[color],
            algorithm,
            parent=self,
            share=self._share,
        )

    def survivors(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, made without a message: all of them call it with the same ones, the others are lost.

        It has no shared memory, to make which the ranks would have to meet.
        """
        kept = sorted(set(ranks))
        if self.rank not in kept or any(rank not in range(self.size) for rank in kept):
            raise ValueError(f"survivors({list(ranks)}): ranks of this communicator of {self.size}, {self.rank} among them")
        below = self._transport.below if isinstance(self._transport, SharedTransport) else self._transport
        return Communicator(
            f"{self._name}.{'-'.join(map(str, kept))}",
            [self._ranks[rank] for rank in kept],
            kept.index(self.rank),
            below,
            self._issuer,
            self._watch,
            [self._keys[rank] for rank in kept],
            None,
            parent=self,
        )

    def hotline(self, answer: Answer) -> Hotline:
        """A side line on which the ranks can ask each other, whatever their training threads do. All ranks call it."""
        return Hotline("127.0.0.1" if self.inter_size == 1 else self._transport.address, answer, self.allgather_obj)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # after an exception the sockets stay open until the exit hook has told the others the reason
        if kind is None:
            self.close()


def _leave_team(team: HostTeam, watch: Watch | None, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has dropped its copy
    if watch is not None and team.abort in watch.interrupts:
        watch.interrupts.remove(team.abort)
    team.close()


def prepare(transport: Transport, ranks: Sequence[int], schedule: Schedule) -> None:
    """Ready the transport for a communicator of `ranks`; all ranks of the world call it, members or not."""
    for needed in (schedule, scattering(len(ranks))):
        transport.prepare(needed, ranks)
