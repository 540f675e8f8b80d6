"""One epoch of an elastic job: its members, connected. It never changes. The next epoch has its own world."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from phalanx.comm.addresses import interface_towards, is_loopback
from phalanx.comm.connection import Connection
from phalanx.comm.elastic.agreement import Proposal, Report
from phalanx.comm.elastic.board import PREFIX, Board
from phalanx.comm.issuer import Issuer
from phalanx.comm.members import Members
from phalanx.comm.transports.local import LocalTransport, LocalWorld
from phalanx.comm.transports.torch.gloo import GlooTransport, make_gloo
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule

T = TypeVar("T")

LONGEST_WAIT = 3600.0  # seconds to wait for a message; a thread that waits in gloo and missed the cut ends then, too
LOOK = 0.01  # seconds between two checks whether the world is still needed, while it is made


class Superseded(Exception):  # noqa: N818  not an error: there is a newer epoch
    """The coordinator wants another world than the one that is being made."""


class World:
    """The connected members of one epoch. `member` is this process."""

    def __init__(self, proposal: Proposal, member: int, connection: Connection, teams: Sequence[HostTeam]) -> None:
        self.proposal, self.connection, self._teams = proposal, connection, teams
        self.epoch, self.members = proposal.epoch, proposal.members
        self.rank = proposal.members.index(member)
        self._aborted = False
        below = getattr(connection.transport, "below", connection.transport)
        self._gloo = below if isinstance(below, GlooTransport) else None

    @property
    def broken(self) -> bool:
        """Whether a communication has failed."""
        return self._aborted or self.connection.issuer.breakdown.error is not None

    def has_too_few(self, least: int) -> bool:
        """Whether it waits between two steps until more ranks have come."""
        return len(self.members) < max(least, self.proposal.needs)

    def abort(self) -> None:
        """From any thread: calls that wait in this world fail soon, and later calls fail at once."""
        if not self._aborted:
            self._aborted = True
            for team in self._teams:
                team.abort()
            if self._gloo is not None:
                self._gloo.close()
            self.connection.issuer.breakdown.cut_since = time.monotonic()

    def close(self) -> None:
        """Free everything. What this rank has in flight is lost."""
        self.abort()
        with contextlib.suppress(RuntimeError):
            self.connection.close()
        if self._gloo is not None:
            self._gloo.free()


def form(
    board: Board,
    proposal: Proposal,
    member: int,
    reports: Sequence[Report],
    *,
    timeout: float,
    algorithm: Schedule | None,
) -> World:
    """Connect the members of a proposal, which have all reported. `board` is a client for this world alone."""
    rank, size = proposal.members.index(member), len(proposal.members)
    keys = tuple(report.host for report in reports)
    members = Members(f"epoch {proposal.epoch}", tuple(range(size)), rank, keys)
    if algorithm is not None and algorithm.world != size:
        algorithm = None  # a schedule is for one size; another one is chosen, and verified, for the others
    teams: list[HostTeam] = []

    def share(name: str, place: int, width: int) -> HostTeam | None:
        team = HostTeam.join(board.under("memory"), place, width, timeout=timeout, name=name)
        if team is not None:
            teams.append(team)
        return team

    def connect() -> Connection:
        if size == 1:
            return Connection(members, LocalTransport(LocalWorld(1), 0), Issuer(timeout, None), None, algorithm)
        meeting = dist.PrefixStore(f"{PREFIX}/{board.point.token}/gloo/{proposal.epoch}", board.base)
        gloo = make_gloo(meeting, rank, size, interface=_interface(board.point.host), timeout=timeout)
        transport = GlooTransport(gloo, max(LONGEST_WAIT, 2 * timeout))
        issuer = Issuer(timeout, None, transport.cut)
        transport.got_on = issuer.activity.got_on
        return Connection(members, transport, issuer, None, algorithm, share=share)

    return World(proposal, member, connect(), teams)


def _interface(host: str) -> str | None:
    return interface_towards("127.0.0.1" if is_loopback(host) else host, 9)


def unless(superseded: Callable[[], bool], work: Callable[[], T], too_late: Callable[[T], None]) -> T:
    """The result of `work`, which may wait for members that have died, or for a store that does not answer.

    Raises Superseded if the coordinator wants another world. Then `work` is left alone, and if it still returns a result,
    `too_late` gets it.
    """
    result: list[T] = []
    error: list[BaseException] = []
    done, deciding = threading.Event(), threading.Lock()
    left_alone = False

    def run() -> None:
        try:
            result.append(work())
        except BaseException as caught:  # noqa: BLE001  raised in the calling thread
            error.append(caught)
        with deciding:
            done.set()
        if left_alone and result:
            too_late(result[0])

    threading.Thread(target=run, name="phalanx-meeting", daemon=True).start()
    while not done.wait(LOOK):
        if superseded():
            with deciding:
                left_alone = not done.is_set()
            if left_alone:
                raise Superseded
    if error:
        raise error.pop()  # this frame must not keep it: it keeps frames with a client of the store
    return result[0]
