"""How a member gets from one world to the next: all members report how far they are, conclude what counts, and connect anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.comm.elastic.agreement import Conclusion, Proposal, Report, StateLostError, Verdict, conclude
from phalanx.comm.elastic.board import LOOK, Board, Ready, quietly
from phalanx.comm.elastic.guard import Guard, end_behind
from phalanx.comm.elastic.membership import Change
from phalanx.comm.elastic.world import Superseded, World, form, unless
from phalanx.comm.failure import CommunicationError
from phalanx.comm.hosts import host_key
from phalanx.native.errors import SharedMemoryError
from phalanx.schedule import Schedule


@dataclass(frozen=True)
class Crossing:
    """A new world, and what it means for this member."""

    world: World
    conclusion: Conclusion
    newcomers: tuple[int, ...]  # ranks that need the state

    @property
    def verdict(self) -> Verdict:
        return self.conclusion.verdicts[self.world.rank]

    def change(self, seconds: float, *, redone: bool) -> Change:
        """The entry in the history of this member."""
        proposal = self.world.proposal
        size, committed = len(proposal.members), self.conclusion.committed
        return Change(proposal.epoch, proposal.joined, proposal.left, size, committed, redone, seconds)


class Passage:
    """The path of one member through the epochs."""

    def __init__(
        self,
        board: Board,
        member: int,
        ready: Ready,
        algorithm: Schedule | None,
        timeout: float,
        *,
        is_new: bool | None = None,
    ) -> None:
        """`is_new`: the job was running before this process came; None finds out."""
        self.member, self.timeout, self.ready = member, timeout, ready
        self.board, self._algorithm = board, algorithm
        self.committed = 0
        self.waits = False
        self.tried = 0  # the newest epoch that this member has tried to enter
        board.announce(member)
        self.is_new = board.newest(0) is not None if is_new is None else is_new
        self.idle: Callable[[], float] = lambda: 0.0  # seconds since this member last sent or received something
        self.guard = Guard(board.another(), member, lambda: (self.committed, self.waits, self.idle()))
        self._host = host_key()

    def be_ready(self) -> None:
        """From now on this member can be let in."""
        self.board.be_ready(self.member, self.ready)

    def begin(self) -> None:
        """Wait for the first world. A member that finds no room in it (`max_ranks`) is new, as one that comes later."""
        self.be_ready()
        proposal = self._next(0)
        self.is_new = self.member not in proposal.members or self.member in proposal.joined

    def cross(self, before: World | None, *, holds: bool = False, between: bool = False) -> Crossing:
        """Enter the newest world, whatever happens on the way; `before` is the one that this member leaves."""
        epoch = max(self.tried, before.epoch if before is not None else 0)
        if before is not None:
            before.close()  # the others, which may wait for this rank there, notice it
            if self.guard.newer_than(epoch) is None and not self.guard.lost:
                self._complain(before.epoch)  # no member has died, so the connections were at fault
        while True:
            proposal = self._next(epoch)
            epoch = self.tried = proposal.epoch
            if self.member not in proposal.members:
                continue  # not let in yet, or fenced: then the guard ends this process
            try:
                return self._enter(proposal, holds=holds, between=between)
            except Superseded:
                continue
            except (SharedMemoryError, RuntimeError, OSError) as error:
                if isinstance(error, StateLostError | CommunicationError):
                    raise
                self._complain(epoch)

    def alone(self) -> World:
        """A newcomer's world until it is let in: it sets its script up as if it were alone."""
        proposal = Proposal(0, (self.member,))
        return form(self.board, proposal, self.member, [Report(None)], timeout=self.timeout, algorithm=None)

    def stand(self, world: World) -> None:
        """This member is connected, and has the state."""
        with quietly():
            self.board.stand(world.epoch, self.member)

    def _complain(self, epoch: int) -> None:
        with quietly():  # if the board is lost, the guard notices, and ends the wait for the next proposal
            self.board.complain(epoch)

    def leave(self, *, finished: bool) -> None:
        self.guard.close()
        if finished:
            self.board.finish(self.member)

    def _next(self, epoch: int) -> Proposal:
        try:
            return self.guard.wait_for(epoch)
        except ConnectionError as error:
            raise CommunicationError(f"the elastic job of member {self.member} is over: {error}", operation="elastic") from None

    def _enter(self, proposal: Proposal, *, holds: bool, between: bool) -> Crossing:
        if self.member in proposal.joined and not self.is_new:
            end_behind(self.member, proposal.epoch, "became a member at the moment of a death, and the others did not notice")
        report = Report(None if self.is_new else self.committed, holds, between, self._host)
        superseded: Callable[[], bool] = lambda: self.guard.newer_than(proposal.epoch) is not None or bool(self.guard.lost)  # noqa: E731

        def meet() -> Crossing:
            board = self.board.another()  # an abandoned thread keeps its client busy
            board.report(proposal.epoch, self.member, report)
            while (reports := board.reports(proposal)) is None:
                if superseded():
                    raise Superseded
                time.sleep(LOOK)
            conclusion = conclude(reports)
            if conclusion.too_early:
                board.complain(proposal.epoch)
                raise Superseded
            world = form(board, proposal, self.member, reports, timeout=self.timeout, algorithm=self._algorithm)
            newcomers = tuple(rank for rank, verdict in enumerate(conclusion.verdicts) if verdict is Verdict.HEAL)
            return Crossing(world, conclusion, newcomers)

        return unless(superseded, meet, lambda crossing: crossing.world.close())
