"""A thread of every member. It shows that the process is alive, and learns of new worlds while the training thread computes.

It also ends a process that the others have left behind. Such a process must not write a checkpoint or send a message any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from phalanx.comm.elastic.agreement import Proposal
from phalanx.comm.elastic.board import Beat, Board
from phalanx.comm.elastic.coordinator import ASLEEP, BEAT, LOST
from phalanx.comm.ending import say_last

LOOK = 0.07  # seconds between two looks at the board; each costs 0.35 kB on the wire
FENCED = 75  # the exit code of a process that the others have left behind: EX_TEMPFAIL of sysexits.h


class Guard:
    """Watches the board for `member`. `progress` returns how far the member is, and `over` is called with new proposals."""

    def __init__(self, board: Board, member: int, progress: Callable[[], tuple[int, bool, float]]) -> None:
        self._board, self._member, self._progress = board, member, progress
        self.newest: Proposal | None = None
        self.lost = ""  # why the job cannot be heard any more
        self._heard = threading.Condition()
        self._over = threading.Event()
        self._answered = time.monotonic()
        self.over: Callable[[Proposal], None] = lambda proposal: None
        self._thread = threading.Thread(target=self._watch, name="phalanx-guard", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_the_watch, name="phalanx-lease", daemon=True).start()

    def newer_than(self, epoch: int) -> Proposal | None:
        """The newest proposal, if it is of a later epoch."""
        found = self.newest
        return found if found is not None and found.epoch > epoch else None

    def wait_for(self, epoch: int) -> Proposal:
        """A proposal of a later epoch than this one; waits for it."""
        with self._heard:
            self._heard.wait_for(lambda: self.newer_than(epoch) is not None or self.lost)
        found = self.newer_than(epoch)
        if found is None:
            raise ConnectionError(self.lost)
        return found

    def close(self) -> None:
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _watch(self) -> None:
        count, beaten = 0, 0.0
        while not self._over.wait(LOOK):
            try:
                now = time.monotonic()
                if now - beaten >= BEAT:
                    beaten, count = now, count + 1
                    self._board.beat(self._member, Beat(count, *self._progress()))
                found = self._board.newest(self.newest.epoch if self.newest else 0)
                if count % 4 == 0 and (why := self._board.stopped()) is not None:
                    self._lose(why)
                    return
                self._answered = time.monotonic()
            except RuntimeError:
                if not self._is_there():
                    self._lose("the agent that holds its meeting point was lost")
                    return
                continue
            if found is not None:
                self._hear(found)

    def _watch_the_watch(self) -> None:
        """If the network is cut, the other thread waits forever. Then this process must stop: the others leave it behind."""
        looked = time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            if now - looked > ASLEEP:  # this process was stopped: an answer may be there
                self._answered = now
            looked = now
            if not self.lost and now - self._answered > LOST:
                self._lose(f"its meeting point at {self._board.point.host} has not answered for {LOST:g} s")

    def _is_there(self) -> bool:
        try:
            self._board.rung()
        except RuntimeError:
            return False
        return True

    def _hear(self, proposal: Proposal) -> None:
        if self._member not in proposal.members and (why := self._board.out(self._member)) is not None:
            end_behind(self._member, proposal.epoch, why)
        if self.lost:
            return  # too late: this process has given up
        with self._heard:
            self.newest = proposal
            self._heard.notify_all()
        self.over(proposal)

    def _lose(self, why: str) -> None:
        with self._heard:
            if self.lost:
                return
            self.lost = why
            self._heard.notify_all()
        if self.newest is not None:
            self.over(Proposal(self.newest.epoch, ()))


def end_behind(member: int, epoch: int, why: str) -> NoReturn:
    """End this process, which the others have left behind: it must not write or send anything any more."""
    say_last(f"member {member} was left behind in epoch {epoch}, because it {why}: it ends (exit code {FENCED})")
    os._exit(FENCED)
