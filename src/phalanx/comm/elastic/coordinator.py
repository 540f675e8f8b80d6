"""The one place that decides who is in an elastic job. It runs in the supervisor, which is not a rank, so every rank may die.

`look` is called many times per second. It reads what members wrote on the board, and their signs of life. All decisions are in
`Roster`, which is a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from phalanx.comm.elastic.agreement import Proposal, Roster
from phalanx.comm.elastic.board import Beat, Board, Ready
from phalanx.comm.elastic.membership import Change
from phalanx.comm.processes import ProcessId

BEAT = 0.25  # seconds between two signs of life of a member
STILL = 3.0  # seconds without one before a member is given up, at least; the beats come from their own thread
STEPS_STILL = 2.0  # the same in usual rounds: code that holds Python's lock stops the beats, at most for about a step
BROKEN = 1.0  # seconds in which a death explains a broken connection; then the same members connect again
LONGEST_BROKEN = 8.0  # the same, if connections keep breaking
SUSPECT = 1.0  # seconds without a sign of life before a host whose connections broke too is given up
LOST = 5.0  # seconds without an answer before ranks and agents give up the board; longer than STILL, so they learn why
ASLEEP = 1.0  # if two looks are this many seconds apart, the supervisor itself was stopped and heard no sign of life


@dataclass
class Pulse:
    """The last sign of life of a member, and how fast its rounds are."""

    process: ProcessId | None = None
    beat: Beat = field(default_factory=lambda: Beat(-1, 0, waits=False))
    heard: float = 0.0  # when the beat changed last
    waits_since: float | None = None
    usual: float = 0.0  # seconds of a round
    measured: tuple[float, int] = (0.0, 0)  # when, and at which round, the last measurement began

    def hear(self, beat: Beat, now: float) -> None:
        if beat.count == self.beat.count:
            return
        if not beat.waits or beat.committed != self.beat.committed:
            self.waits_since = None
        if beat.waits and self.waits_since is None:
            self.waits_since = now
        since, committed = self.measured
        if beat.committed > committed:
            if since:
                self.usual = (now - since) / (beat.committed - committed)
            self.measured = now, beat.committed
        self.beat, self.heard = beat, now

    def still(self, now: float) -> float | None:
        """Seconds since its last sign of life, if that is too long."""
        seconds = now - self.heard
        return seconds if self.heard and seconds > max(STILL, STEPS_STILL * self.usual) else None


@dataclass
class Coordinator:
    """Decides about the members of one job. `say` prints a line about every change."""

    board: Board
    first: int
    say: Callable[[str], None] = lambda words: None
    roster: Roster = field(init=False)
    wants: Ready = field(default_factory=Ready)
    admits: Callable[[int], bool] = lambda member: True  # whether a member may be let in now
    changes: list[Change] = field(default_factory=list)
    needs: int = 0  # how many ranks a world needs to train (quorum.py); below, what the newest proposal said
    _needed: int = 0
    _pulses: dict[int, Pulse] = field(default_factory=dict)
    _published: int = 0
    _proposed: float = 0.0
    _stood: int = 0  # the newest epoch that was announced to the user, and its members
    _announced: tuple[int, ...] = ()
    _rung: bytes | None = b"never"
    _looked: float = 0.0
    _listened: float = 0.0
    _broken: float | None = None
    _broke: bool = False  # the world before the newest did not work
    _refused: bool = False  # a member is ready, but must wait outside
    _patience: float = BROKEN  # seconds, as BROKEN; doubled each time if worlds break one after the other

    def __post_init__(self) -> None:
        self.roster = Roster(first=self.first)

    @property
    def proposal(self) -> Proposal | None:
        return self.roster.proposal

    def expect(self, member: int) -> None:
        """A process was started that will be this member."""
        self._pulses[member] = Pulse()

    def look(
        self, ended: Mapping[int, str] | None = None, expected: int | None = None, spared: Collection[int] = ()
    ) -> dict[int, str]:
        """See what has changed. `ended`: members whose processes have ended, and how. Returns the members given up now.

        `spared` members are silent together with their whole host, so the head decides about them.
        """
        now = time.monotonic()
        if now - self._looked > ASLEEP:
            for pulse in self._pulses.values():
                pulse.heard = now if pulse.heard else 0.0
                pulse.waits_since = None
        self._looked = now
        lost = dict(ended or {})
        given_up: dict[int, str] = {}
        if now - self._listened > BEAT:
            self._listened = now
            given_up = self._listen(now, spared)
            lost |= given_up
        rung = self.board.rung()
        news = rung != self._rung
        if news:
            self._rung = rung
            lost = {member: "finished" for member in self._pulses if self.board.finished(member)} | lost
        self._see_who_stands()  # first: a newcomer that has the state is a survivor
        self.roster = self.roster.went(lost, expected)
        for member, why in lost.items():
            self._pulses.pop(member, None)
            self.board.put_out(member, why)
        if news or self._refused:
            self._let_in()
        self._look_at_the_world(now)
        self._publish(now)
        return given_up

    def heard(self, member: int) -> float:
        """When this member gave its last sign of life; 0 if it has given none."""
        return self._pulses[member].heard if member in self._pulses else 0.0

    def is_stuck(self, now: float) -> bool:
        """Whether the newest world cannot form, or all its members wait without progress, although all are alive."""
        proposal = self.proposal
        if proposal is None or not proposal.members:
            return False
        if not self.roster.stands:
            return now - self._proposed > SUSPECT
        beats = [self._pulses[member].beat for member in proposal.members if member in self._pulses]
        return bool(beats) and all(beat.waits and beat.idle > SUSPECT for beat in beats)

    @property
    def is_broken(self) -> bool:
        """Whether a member reports that the connections of the newest world do not work."""
        return self._broken is not None or (self._broke and not self.roster.stands)

    def resume(self) -> None:
        """The current world has enough ranks now, with the same members. Let them know."""
        if self.proposal is not None and self._needed > len(self.proposal.members):
            self.roster = self.roster.broke(self.proposal.epoch)

    def _listen(self, now: float, spared: Collection[int]) -> dict[int, str]:
        """Members that will not answer any more."""
        found: dict[int, str] = {}
        members = self.proposal.members if self.proposal is not None else ()
        for member, pulse in self._pulses.items():
            beat = self.board.beat_of(member)
            if beat is not None:
                pulse.hear(beat, now)
            if pulse.process is None:
                pulse.process = self.board.process(member)
            if member in members and member not in spared and (seconds := pulse.still(now)) is not None:
                found[member] = f"gave no sign of life for {seconds:.1f} s and was given up"
        waiting = [m for m in members if m in self._pulses and self._pulses[m].waits_since is not None]
        patient = self.wants.patience
        if any(now - (self._pulses[m].waits_since or now) > patient for m in waiting):
            for member in set(members) - set(waiting) - found.keys() - set(spared):
                found[member] = f"did not reach the others' step within {patient:g} s and was given up"
        return found

    def _let_in(self) -> None:
        known = self.roster.waiting + (self.proposal.members if self.proposal is not None else ())
        self._refused = False
        for member in list(self._pulses):
            if member in known or (ready := self.board.ready(member)) is None:
                continue
            if self.admits(member):
                self.wants = ready
                self.roster = replace(self.roster, most=ready.most).came(member)
            else:
                self._refused = True

    def _see_who_stands(self) -> None:
        proposal = self.proposal
        if proposal is None:
            return
        for member in set(proposal.members) - self.roster.standing:
            if proposal is self.proposal and self.board.stood(proposal.epoch, member):
                self.roster = self.roster.stood(proposal.epoch, member)

    def _look_at_the_world(self, now: float) -> None:
        self._see_who_stands()
        proposal = self.proposal
        if proposal is None:
            return
        if self.roster.standing >= set(proposal.members) and self._stood < proposal.epoch and proposal.members:
            self._stood = proposal.epoch
            seconds = now - self._proposed
            # compared with the last announced world: some worlds end too fast to be announced
            why = dict(self.roster.gone)
            left = tuple((member, why.get(member, "left")) for member in self._announced if member not in proposal.members)
            joined = tuple(member for member in proposal.members if member not in self._announced) if self._announced else ()
            self._announced = proposal.members
            change = Change(proposal.epoch, joined, left, len(proposal.members), seconds=seconds)
            self.changes.append(change)
            if change.joined or change.left:
                self.say(str(change))
        if self.board.broken(proposal.epoch) and self.proposal is proposal:
            self._broken = self._broken or now
            if now - self._broken > self._patience:
                self.roster, self._broke = self.roster.broke(proposal.epoch), True
                self._patience = min(LONGEST_BROKEN, 2 * self._patience)
        elif self.roster.stands:
            self._broke = False
        if self.roster.stands and now - self._proposed > LONGEST_BROKEN:
            self._patience = BROKEN

    def _publish(self, now: float) -> None:
        proposal = self.proposal
        if proposal is not None and proposal.epoch > self._published:
            # a look may have raised the number twice, and members look for the next one: a gap would hide all that follow
            proposal = replace(proposal, epoch=self._published + 1)
            self.roster = replace(self.roster, proposal=proposal)
            self.board.propose(replace(proposal, needs=self.needs))
            self._needed = self.needs
            if (old := self.board.proposal(proposal.epoch - 3)) is not None:
                self.board.forget(old.epoch, old.members)
            self._published, self._proposed, self._broken = proposal.epoch, now, None
