"""The standing of a gossiping rank among the others, and what it does about it: a pure function of their answers.

    in step     exchanges arrive
    late        a partner did not send in time, or this rank was away itself: it asks the others, and `decide` chooses
    left behind the furthest rank is more than two periods ahead: take over its replica and its round
    alone       too few ranks answer: wait and ask again, so that no replica trains alone
    minority    still alone after the communicator's timeout: stop with an error
    left out    the others have finished a collective without this rank: stop with an error

Two groups of ranks that cannot reach each other never both continue. A group needs more than half of the ranks that are not known
to be dead, or exactly half including the lowest of them. Dead means that a process has ended. A rank that is only silent still
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.grad.gossip.membership import Membership


def limit(membership: Membership) -> int:
    """Return the rounds by which ranks may differ: two periods. What one rank did reaches all others in one."""
    return 2 * membership.period


def has_quorum(side: Collection[int], size: int, dead: Collection[int]) -> bool:
    """Whether the ranks of `side` may continue without the others of `size`."""
    living = [rank for rank in range(size) if rank not in dead]
    here = [rank for rank in living if rank in side]
    return 2 * len(here) > len(living) or (2 * len(here) == len(living) and here[:1] == living[:1])


@dataclass(frozen=True, slots=True)
class Word:
    """The answer of a rank that is asked for its state."""

    round: int  # of its next exchange
    steps: int  # done by its optimizer
    gathering: bool  # whether it waits for all ranks in average_(), spread() or survivors()
    skips: tuple[int, ...]  # the ranks that it does not wait for now
    leaves: tuple[int, ...]  # its membership

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Word:
        return Word(
            round=int(answer["round"]),
            steps=int(answer["steps"]),
            gathering=bool(answer["gathering"]),
            skips=tuple(map(int, answer["skips"])),
            leaves=tuple(map(int, answer["leaves"])),
        )

    def to_answer(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "steps": self.steps,
            "gathering": self.gathering,
            "skips": self.skips,
            "leaves": self.leaves,
        }


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's own view of itself."""

    me: int
    round: int  # of its next exchange
    membership: Membership

    @property
    def size(self) -> int:
        return len(self.membership.leaves)

    def others(self) -> list[int]:
        """Return the ranks to ask: all that are not known to be dead, including those left out, which must learn about it."""
        return [rank for rank in range(self.size) if rank != self.me and rank not in self.membership.dead]


@dataclass(frozen=True, slots=True)
class GoOn:
    """In step. Don't wait for `skips`: they are silent, too far behind, or wait for all ranks."""

    skips: frozenset[int]


@dataclass(frozen=True, slots=True)
class Return:
    """Others skip this rank or are ahead: move to the furthest round, and tell them.

    With `helpers`, furthest first, it fell behind too far: take over the replica of one of them.
    """

    round: int  # of the furthest
    behind: int  # rounds
    helpers: tuple[int, ...]
    skips: frozenset[int]


@dataclass(frozen=True, slots=True)
class Hold:
    """Alone: the `silent` ranks do not answer, and the others are too few."""

    silent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """These ranks have finished a collective without this one."""

    by: tuple[int, ...]


Action = GoOn | Return | Hold | Leave


def unremarkable(place: Place, words: Mapping[int, Word]) -> bool:
    """Whether the partners that were asked are merely slow, so that no other rank has to be asked."""
    return all(
        abs(word.round - place.round) <= limit(place.membership)
        and not word.gathering
        and place.me not in word.skips
        and not word.leaves[place.me]
        for word in words.values()
    )


def decide(place: Place, words: Mapping[int, Word]) -> Action:
    """Decide what to do after all `place.others()` were asked and these answered."""
    by = tuple(sorted(rank for rank, word in words.items() if word.leaves[place.me]))
    if by:
        return Leave(by)
    heard = {rank: word for rank, word in words.items() if rank not in place.membership.gone}
    silent = frozenset(place.others()) - heard.keys()
    if not has_quorum({place.me, *heard}, place.size, place.membership.dead):
        return Hold(tuple(sorted(silent)))
    furthest = max([place.round, *(word.round for word in heard.values())])
    near = furthest - limit(place.membership)
    skips = (silent - set(place.membership.gone)) | {rank for rank, word in heard.items() if word.gathering or word.round < near}
    if place.round < near:
        helpers = sorted(
            (rank for rank, word in heard.items() if word.round >= near), key=lambda rank: (-heard[rank].round, rank)
        )
        return Return(furthest, furthest - place.round, tuple(helpers), skips)
    if any(place.me in word.skips for word in heard.values()):
        return Return(furthest, furthest - place.round, (), skips)
    return GoOn(skips)
