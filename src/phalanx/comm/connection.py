"""What a communicator stands on: transport, issuing thread, failure watch, and the memory that the ranks of a host share.

Ranks that split share transport, thread and watch with their parent; each part has its own shared memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from phalanx.comm.choose import choose
from phalanx.comm.ending import release
from phalanx.comm.envelope import pack, unpack
from phalanx.comm.failure import Watch
from phalanx.comm.hosts import Hosts
from phalanx.comm.issuer import Issuer
from phalanx.comm.members import Members, by_color
from phalanx.comm.messages import allgather
from phalanx.comm.operations import Operations
from phalanx.comm.reduce_scatter import scattering
from phalanx.comm.transports import Transport
from phalanx.comm.transports.shared import SharedTransport
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule

Share = Callable[[str, int, int], HostTeam | None]  # (name, rank and size on this host) -> shared memory, where it is possible


class Connection:
    """The members of a communicator, connected. `algorithm` is the schedule that the user named, if any."""

    def __init__(
        self,
        members: Members,
        transport: Transport,
        issuer: Issuer,
        watch: Watch | None,
        algorithm: Schedule | None,
        *,
        parent: Connection | None = None,
        share: Share | None = None,
    ) -> None:
        self.members, self.issuer, self.algorithm = members, issuer, algorithm
        team, self.shared = share_memory(members, transport, issuer, share)
        if team is not None:
            transport = SharedTransport(transport, team, [members.ranks[rank] for rank in members.on_this_host])
            if members.inter_size > 1:
                team.set_long_pieces()  # the network is the bottleneck then, and it idles during every meeting
        self.transport = transport
        above: Operations | None = parent.operations if parent is not None else None
        self.operations: Operations = Operations(members, transport, issuer, team=team, parent=above)
        self._watch, self._parent, self._share, self._splits = watch, parent, share, 0
        self._leave = leave_later(self.operations, team, watch) if team is not None else None
        if transport.cold:
            self._connect_nccl()

    def _connect_nccl(self) -> None:
        """Now rather than in the first step, and watched like every operation: a rank may die before it comes."""
        x = torch.zeros(1, device=self.transport.device)
        self.operations.start("connect NCCL", lambda tag: self.transport.warm_up(x), [x], queued=True).wait_for_device()

    def gather_objects(self, obj: Any) -> list[Any]:
        """The plain data of all ranks, on all ranks."""
        return [unpack(x) for x in allgather(self.operations, pack(obj))]

    def split(self, color: int, table: Sequence[tuple[int, int]]) -> Connection:
        """The part with `color`; `table` has every rank's (color, key)."""
        members, parts = self.members, by_color(table)
        self._splits += 1
        algorithm = self.algorithm if len(parts) == 1 else None  # a schedule is for one world size
        if self._parent is None and self.transport.library:
            # all ranks of the world make NCCL's groups together, so this is possible only here; deeper splits run as Moves
            for own in parts.values():
                hosts = Hosts.of([members.keys[rank] for rank in own])
                schedule = algorithm or choose(hosts, library=True).schedule
                prepare(self.transport, [members.ranks[rank] for rank in own], schedule)
        part = members.only(parts[color], f"{members.name}.{self._splits}.{color}")
        return Connection(part, self.transport, self.issuer, self._watch, algorithm, parent=self, share=self._share)

    def survivors(self, ranks: Sequence[int]) -> Connection:
        """These ranks, connected without a message, and so without shared memory, for which they would have to meet."""
        kept, rank, size = sorted(set(ranks)), self.members.rank, self.members.size
        if rank not in kept or any(other not in range(size) for other in kept):
            raise ValueError(f"survivors({list(ranks)}): pass ranks from 0 to {size - 1}, with this rank, {rank}, among them")
        below = self.transport.below if isinstance(self.transport, SharedTransport) else self.transport
        members = self.members.only(kept, f"{self.members.name}.{'-'.join(map(str, kept))}")
        return Connection(members, below, self.issuer, self._watch, None, parent=self)

    def close(self) -> None:
        """Finish what is queued, then close; a part leaves its parent open. Idempotent."""
        if self.operations.closed_itself or self.issuer.owner.forked:  # a forked child leaves its parent's alone
            return
        self.operations.closed_itself = True
        if self._parent is None:
            self.issuer.stop()
            if self._watch is not None:
                release(self._watch)
                self._watch.stop()
            self.transport.close()
        self._share = None  # it may hold a client of the store
        if self._leave is not None:
            self._leave()

    def close_all(self) -> None:
        """Close this one and those that it was split from."""
        if self._parent is not None:
            self._parent.close_all()
        self.close()


def prepare(transport: Transport, ranks: Sequence[int], schedule: Schedule) -> None:
    """Ready the transport for a communicator of `ranks`; all ranks of the world call it, members or not."""
    for needed in (schedule, scattering(len(ranks))):
        transport.prepare(needed, ranks)


# ---- shared memory -------------------------------------------------------------------------------------------------------------


def share_memory(members: Members, transport: Transport, issuer: Issuer, share: Share | None) -> tuple[HostTeam | None, bool]:
    """The shared memory of this host's ranks, and whether every host has one. Either all hosts use theirs, or none does.

    All ranks must decide alike, or they would run different schedules.
    """
    if share is None or max(len(ranks) for ranks in members.hosts.ranks) == 1:
        return None, False
    team = None
    width = len(members.on_this_host)
    if width > 1:
        team = share(f"{members.name}/{members.inter_rank}", members.intra_rank, width)
    works = team is not None or width == 1
    if members.inter_size > 1:
        asking = Operations(replace(members, name=f"{members.name}/memory"), transport, issuer)
        works = all(unpack(x) for x in allgather(asking, pack(works)))
    if team is not None and not works:
        team.close()
        team = None
    return team, works


def leave_later(operations: Operations, team: HostTeam, watch: Watch | None) -> Callable[[], object]:
    """Leave the team when the returned function is called, or when nothing uses `operations` any more.

    Only this rank leaves: the others may still be using the memory.
    """
    if watch is not None:
        watch.interrupts.append(team.abort)
    leave = weakref.finalize(operations, _leave, team, watch, os.getpid())
    leave.atexit = False  # at exit, close() decides the order
    return leave


def _leave(team: HostTeam, watch: Watch | None, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child drops its copy; the team belongs to the parent
    if watch is not None and team.abort in watch.interrupts:
        watch.interrupts.remove(team.abort)
    team.close()
