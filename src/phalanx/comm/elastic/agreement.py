"""How the ranks of an elastic job agree: pure functions of what each of them says. No clock, no socket, no thread.

Everything that ranks do together is a *round*: an exchange of gradients, or one verb of the communicator. A round has two phases.
First each rank gets the result. Then all commit it: a tiny all-reduce, which a rank can leave only when all have the result.

    rank 0     gets the result ------ holds it -- commits ----------> applies it
    rank 1     gets the result ------ holds it -- the commit breaks:  some rank may have applied it, and all ranks have it
    rank 2     the exchange breaks:   no rank can have applied it

So after a failure the survivors differ by at most one round, and if any of them has committed it, the others hold its result.
They tell each other how far they are (`Report`), and all draw the same conclusion (`conclude`). The round counts for all
survivors, or for none. If for none, they do it again.

Only the coordinator decides which members are alive. It numbers the worlds. A process that reads a `Proposal` without its own
number is fenced: the others have left it behind. `Roster` is the coordinator's whole memory.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Proposal:
    """The world that the coordinator wants: epoch number, and member numbers in rank order. `left` lists who left, and why.

    With fewer than `needs` members it waits between two steps, because more may be alive behind a network cut (quorum.py).
    """

    epoch: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    left: tuple[tuple[int, str], ...] = ()
    needs: int = 0

    def ends(self, world: Sequence[int]) -> bool:
        """Whether a world of these members cannot continue because one of them has left. A newcomer alone can wait."""
        return not set(world) <= set(self.members)

    def to_json(self) -> str:
        return json.dumps([self.epoch, self.members, self.joined, self.left, self.needs])

    @staticmethod
    def from_json(text: str | bytes) -> Proposal:
        epoch, members, joined, left, needs = json.loads(text)
        gone = tuple((int(who), str(why)) for who, why in left)
        return Proposal(int(epoch), tuple(members), tuple(joined), gone, int(needs))


@dataclass(frozen=True, slots=True)
class Report:
    """How far a member is when it enters a new world: the rounds it has committed, and whether it holds the next result.

    A newcomer has committed None. If all are `between` two steps, a newcomer can be let in. `host` is where the member runs.
    """

    committed: int | None
    holds: bool = False
    between: bool = False
    host: str = ""

    def to_json(self) -> str:
        return json.dumps([self.committed, self.holds, self.between, self.host])

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        committed, holds, between, host = json.loads(text)
        return Report(None if committed is None else int(committed), bool(holds), bool(between), str(host))


class Verdict(enum.Enum):
    """What a member does in a new world."""

    COMMIT = "commit"  # the result that it holds counts
    REDO = "redo"  # nothing that it holds counts; it does its round again, or for the first time
    HEAL = "heal"  # it is new: a member that has the state sends it


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What all members of a new world conclude from their reports. It is the same on each of them."""

    committed: int  # rounds that count for all, from now on
    verdicts: tuple[Verdict, ...]  # in rank order
    source: int  # the rank whose state newcomers get
    too_early: bool = False  # newcomers have come, but not all others are between two steps
    between: bool = False  # all that have the state are between the same two steps


class StateLostError(RuntimeError):
    """The members of a new world do not share one history."""


def conclude(reports: Sequence[Report]) -> Conclusion:
    """What the reports of all members, in rank order, mean."""
    known = [report for report in reports if report.committed is not None]
    if not known:
        raise StateLostError("all members that had the training state have left")
    top = max(report.committed for report in known if report.committed is not None)
    if all(report.holds and report.committed == top for report in known):
        top += 1  # no member has committed, but all can
    verdicts = []
    for rank, report in enumerate(reports):
        if report.committed is None:
            verdicts.append(Verdict.HEAL)
        elif report.committed == top:
            verdicts.append(Verdict.REDO)
        elif report.committed == top - 1 and report.holds:
            verdicts.append(Verdict.COMMIT)
        else:
            raise StateLostError(
                f"rank {rank} has committed {report.committed} rounds, another one has {top}, and it lacks the result"
            )
    source = next(rank for rank, report in enumerate(reports) if report.committed is not None)
    between = all(report.between for report in known)
    return Conclusion(top, tuple(verdicts), source, too_early=len(known) < len(reports) and not between, between=between)


# ---- the coordinator's memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roster:
    """What the coordinator knows: the newest proposal, which of its members have connected, and which members wait to join.

    A newcomer enters only a world whose members have all connected, between two steps. A death cannot wait. So if a member dies
    while a newcomer enters, the newcomer has to wait until the survivors have connected again.
    """

    first: int  # members that the first world waits for
    most: int | None = None
    proposal: Proposal | None = None
    standing: frozenset[int] = frozenset()  # its members that have connected, and have the training state
    waiting: tuple[int, ...] = ()  # in order of arrival
    gone: tuple[tuple[int, str], ...] = ()  # all that ever left

    def came(self, member: int) -> Roster:
        """A member is ready to take part."""
        known = self.waiting + (self.proposal.members if self.proposal is not None else ())
        if member in known or member in dict(self.gone):
            return self
        return replace(self, waiting=(*self.waiting, member))._open_the_door()

    def went(self, lost: Mapping[int, str], expected: int | None = None) -> Roster:
        """Members ended, or were given up. `expected` is how many the first world waits for from now on."""
        news = {member: why for member, why in lost.items() if member not in dict(self.gone)}
        if not news and expected is None:
            return self
        roster = replace(
            self,
            waiting=tuple(member for member in self.waiting if member not in news),
            gone=self.gone + tuple(news.items()),
            first=self.first if expected is None else expected,
        )
        before = self.proposal
        if before is None or not set(before.members) & news.keys():
            return roster._open_the_door()
        # if the world was never complete, newcomers without state have to wait again, and its deaths were not reported yet
        entering = tuple(member for member in before.joined if member not in self.standing)
        left = () if self.stands else before.left
        survivors = tuple(member for member in before.members if member not in news and member not in entering)
        back = tuple(member for member in entering if member not in news)
        left += tuple((member, why) for member, why in news.items() if member in before.members)
        proposal = Proposal(before.epoch + 1, survivors, left=left)
        return replace(roster, proposal=proposal, standing=frozenset(), waiting=back + roster.waiting)

    @property
    def stands(self) -> bool:
        """Whether all members of the newest world have connected."""
        return self.proposal is not None and self.standing >= set(self.proposal.members)

    def broke(self, epoch: int) -> Roster:
        """The world of this epoch does not work, although no member left. The same members try again, and newcomers wait."""
        before = self.proposal
        if before is None or before.epoch != epoch:
            return self
        entering = tuple(member for member in before.joined if member not in self.standing)
        members = tuple(member for member in before.members if member not in entering)
        left = () if self.stands else before.left
        proposal = Proposal(epoch + 1, members, left=left)
        return replace(self, proposal=proposal, standing=frozenset(), waiting=entering + self.waiting)

    def stood(self, epoch: int, member: int) -> Roster:
        """A member has connected to the others of this epoch."""
        if self.proposal is None or self.proposal.epoch != epoch or member in self.standing:
            return self
        return replace(self, standing=self.standing | {member})._open_the_door()

    def _open_the_door(self) -> Roster:
        before = self.proposal
        if before is None:
            if not self.waiting or len(self.waiting) < self.first:
                return self
            first = tuple(sorted(self.waiting)[: self.most])
            rest = tuple(member for member in self.waiting if member not in first)
            return replace(self, proposal=Proposal(1, first), waiting=rest)
        room = len(self.waiting) if self.most is None else max(0, self.most - len(before.members))
        entering, rest = self.waiting[:room], self.waiting[room:]
        if not self.stands or not entering or not before.members:
            return self
        proposal = Proposal(before.epoch + 1, before.members + entering, joined=entering)
        return replace(self, proposal=proposal, standing=frozenset(), waiting=rest)
