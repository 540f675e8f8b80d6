"""Rounds of an elastic job, in a world that may change between two of them. The verbs (communicator.py) are rounds.

The survivors of a death all have the result of a round, or all do it again among themselves (agreement.py). The world of a
round stays in place until the next round begins. So `rank` and `size` change at the same line of your script on every rank, even
if a rank is ahead of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.agreement import Proposal, Verdict
from phalanx.comm.elastic.membership import Change, Membership
from phalanx.comm.elastic.passage import Crossing, Passage
from phalanx.comm.elastic.state import hand_over
from phalanx.comm.elastic.world import World
from phalanx.comm.failure import CommunicationError

T = TypeVar("T")

State = Callable[[], dict[str, Any]]
WAIT = 0.02  # seconds between two looks while there are too few ranks


class Rounds(Communicator):
    """A communicator whose connections are replaced when ranks die and join."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._history: tuple[Change, ...] = ()
        self._next: World | None = None  # the world of the next round, if it is not that of the last one
        self._entering: World | None = None  # the world that newcomers are about to join
        self._wanted = 0  # the newest epoch that a rank knew of at the last commit: the same on all ranks
        self._inside = False  # a round is under way
        self._holds = False  # this rank has its result
        self.loader: object = None  # asks for the next step, so it knows when one is over
        self._state: tuple[State, Callable[[dict[str, Any]], None]] | None = None
        self._closed = False
        self.store: Any = None  # the job's store, if this process is alone and holds it
        self.exchanges = 0  # of gradients, so far
        self.contributors: tuple[int, ...] = ()  # the members whose gradients are in the last one
        self.earlier: dict[int, tuple[int, ...]] = {}  # those of the exchanges before it, by number, until the loader asks
        if not passage.is_new:
            passage.begin()
        if passage.is_new:
            self._world = passage.alone()
        else:
            crossing = passage.cross(None)
            self._world = crossing.world
            passage.stand(crossing.world)
            self._note(crossing, time.monotonic(), redone=False)
        super().__init__(self._world.connection)
        passage.guard.over = self._hear
        passage.idle = lambda: self._world.connection.issuer.activity.state().seconds
        self._hear_now()
        atexit.register(self._leave)

    # ---- the members -----------------------------------------------------------------------------------------------------------

    elastic = True

    @property
    def membership(self) -> Membership:
        """The current epoch, its members in rank order, and the changes so far."""
        return Membership(self._world.epoch, self._world.members, self._history)

    @property
    def member(self) -> int:
        """The number of this process, which it keeps as long as it lives."""
        return self._passage.member

    @property
    def is_new(self) -> bool:
        """Whether this process joined a running job, and does not have its state yet."""
        return self._passage.is_new

    @property
    def unsettled(self) -> bool:
        """Whether the next round cannot use the current connections."""
        return self._next is not None or self._world.broken

    def _hear(self, proposal: Proposal) -> None:
        """In the guard's thread: the coordinator wants another world."""
        for world in (self._world, self._next, self._entering):
            if world is not None and world.epoch and proposal.epoch >= world.epoch and proposal.ends(world.members):
                world.abort()

    def _hear_now(self) -> None:
        if (newest := self._passage.guard.newest) is not None:
            self._hear(newest)

    def _adopt(self, world: World) -> None:
        old, self._world, self._next = self._world, world, None
        if old is not world:
            old.close()
            super().__init__(world.connection)

    # ---- rounds ----------------------------------------------------------------------------------------------------------------

    def round(self, work: Callable[[], T], again: Callable[[], None] = lambda: None, *, counts: bool = False) -> T:
        """The result of `work`, which all ranks do together: all survivors have it, or all do it again.

        `again` is called before every repetition. Work that makes no sense in the new world raises a CommunicationError there.
        `counts`: it is the exchange of a step, whose samples count as used.
        """
        if self._inside or self.is_new:
            return work()
        if self._closed:
            raise RuntimeError("this communicator is closed")
        if self._next is not None:
            self._adopt(self._next)
        if self._world.broken or self._passage.guard.lost:
            self._cross(holds=False)
        while True:
            self._holds = False
            self._inside = self._passage.waits = True
            try:
                result = work()
                self._commit()
                done_in = self._world.members
            except CommunicationError:
                if not self._world.broken:
                    raise  # ranks disagree, for example: nothing is broken
                done_in = self._world.members
                if self._cross(holds=self._holds) is not Verdict.COMMIT:
                    again()
                    continue
            finally:
                self._inside = self._passage.waits = False
            if counts:
                if self.loader is not None:
                    self.earlier[self.exchanges] = self.contributors
                self.contributors, self.exchanges = done_in, self.exchanges + 1
            return result

    def _commit(self, inner: Communicator | None = None) -> None:
        """Leave only when all ranks have the result. The ranks tell each other the newest world they know of."""
        newest = self._passage.guard.newest
        seen = torch.tensor([newest.epoch if newest is not None else 0], dtype=torch.int64)
        reduce = super().all_reduce if inner is None else inner.all_reduce
        self._holds = True
        reduce(seen, "max", label="commit")
        self._wanted = int(seen)
        self._passage.committed += 1
        self._holds = False

    def _cross(self, *, holds: bool) -> Verdict:
        """In a round, or at its start: continue in the newest world."""
        begun = time.monotonic()
        crossing = self._passage.cross(self._next or self._world, holds=holds)
        self._passage.committed = crossing.conclusion.committed
        if crossing.verdict is Verdict.COMMIT:
            self._next = crossing.world  # rank and size change when the next round begins, as on ranks that are ahead
        else:
            self._adopt(crossing.world)
        self._hear_now()
        self._passage.stand(crossing.world)
        self._note(crossing, begun, redone=crossing.verdict is Verdict.REDO)
        return crossing.verdict

    def _note(self, crossing: Crossing, begun: float, *, redone: bool) -> None:
        self._history += (crossing.change(time.monotonic() - begun, redone=redone),)

    # ---- between two steps -----------------------------------------------------------------------------------------------------

    def share(self, state: State, load: Callable[[dict[str, Any]], None]) -> None:
        """What a newcomer gets from the others: `state()` on a rank that has it, `load(state)` on the newcomer.

        On a newcomer this waits until it is one of the ranks, and has loaded their state.
        """
        self._state = state, load
        if self.is_new:
            self._passage.be_ready()
            self._enter_as_newcomer()

    def _enter_as_newcomer(self) -> None:
        failed: World | None = None
        while self.is_new:
            begun = time.monotonic()
            crossing = self._passage.cross(failed)
            failed = crossing.world
            with contextlib.suppress(CommunicationError):  # a rank died: the coordinator will call this process again
                self._heal(crossing)
                self._passage.is_new = False
                self._admit(crossing, begun)
                self._wanted = 0  # others that wait are let in after the next step, as on all ranks

    def _heal(self, crossing: Crossing) -> None:
        """Newcomers get the state. Then all commit to the new world: all are in it, or none is."""
        inner, source = Communicator(crossing.world.connection), crossing.conclusion.source
        self._entering, self._holds = crossing.world, False
        self._hear_now()
        if self._state is None:
            raise RuntimeError("a process wants to join, but this rank has nothing to share: call opt.share(...) on all ranks")
        state, load = self._state
        self._passage.committed = crossing.conclusion.committed
        if (found := hand_over(inner, source, crossing.newcomers, state, self.member)) is not None:
            load(found)
        del found  # a copy of the state, while others may still load theirs
        self._commit(inner)

    def _admit(self, crossing: Crossing, begun: float) -> None:
        self._adopt(crossing.world)
        self._entering = None
        self._passage.stand(crossing.world)
        self._note(crossing, begun, redone=False)

    def between_steps(self, caller: object = None) -> None:
        """Let waiting ranks in. All ranks call it between two steps. A Loader in the shared state does it for you."""
        if self.is_new or (caller is not None and caller is not self.loader):
            return
        # all ranks know whether all are here; if not, one of them may be in the next step already, and the others have to make it
        all_here = self._next is None
        if self._wanted > (self._next or self._world).epoch:
            all_here = self._grow()
        while all_here and (world := self._next or self._world).has_too_few(self._passage.ready.least):
            if self._passage.guard.newer_than(world.epoch) is not None or self._passage.guard.lost:
                all_here = self._grow()
            time.sleep(WAIT)

    def after_step(self) -> None:
        """Without a loader that knows when the next step begins, newcomers come in at the end of a step."""
        if self.loader is None:
            self.between_steps()

    def _grow(self) -> bool:
        """Enter a world with newcomers, or one with fewer members if a rank died. Returns whether all ranks are here."""
        begun = time.monotonic()
        self._passage.waits = True
        try:
            crossing = self._passage.cross(self._next or self._world, between=True)
            while crossing.newcomers:
                entered = crossing
                try:
                    self._heal(entered)
                except CommunicationError:
                    # the commit broke, or something before it: as in every round, all are in the new world or none is
                    holds = self._holds
                    crossing = self._passage.cross(entered.world, holds=holds, between=True)
                    self._passage.committed = crossing.conclusion.committed
                    if crossing.verdict is Verdict.COMMIT:
                        self._adopt(entered.world)
                else:
                    self._admit(entered, begun)
                    return True
            self._next, self._entering = crossing.world, None
            self._hear_now()
            self._passage.stand(crossing.world)
            self._note(crossing, begun, redone=False)
            return crossing.conclusion.between
        finally:
            self._passage.waits = False

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """This rank has finished: the others continue without it. Idempotent."""
        self._leave(finished=True)

    def _leave(self, *, finished: bool | None = None) -> None:
        if self._closed or self._connection.issuer.owner.forked:
            return
        self._closed = True
        atexit.unregister(self._leave)
        self._passage.guard.over = lambda proposal: None
        if finished is None:  # at the end of the program, which may be an uncaught exception
            finished = getattr(sys, "last_value", None) is None
        with contextlib.suppress(RuntimeError):  # the supervisor may have ended
            self._passage.leave(finished=finished)
        for world in (self._world, self._next):
            if world is not None:
                world.close()
