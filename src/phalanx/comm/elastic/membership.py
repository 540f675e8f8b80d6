"""Who is in an elastic job, and how that changed: values that every rank reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the membership.

    Args:
        epoch: The epoch that began with it.
        joined: The members that came.
        left: The members that went, and why, such as `((2, "was killed by signal 9"),)`.
        size: The number of ranks after it.
        round: The rounds of communication that all ranks had committed when it happened.
        redone: Whether the round that was under way was done again, without the members that went.
        seconds: How long the ranks were held up, from the first sign of the change to the new world.
    """

    epoch: int
    joined: tuple[int, ...] = ()
    left: tuple[tuple[int, str], ...] = ()
    size: int = 0
    round: int = 0
    redone: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        words = [f"member {member} {why}" for member, why in self.left]
        if self.joined:
            words.append(f"{_members(self.joined)} joined")
        what = "; ".join(words) or "the first ranks met"
        redone = ", one step redone" if self.redone else ""
        return f"epoch {self.epoch}: {what}; {self.size} rank{'s' * (self.size != 1)} after {self.seconds:.2f} s{redone}"


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of an elastic job now. `opt.membership` and `comm.membership` return it.

    A member keeps its number as long as its process lives. Its rank is its place in `ranks`, and changes when others leave.

    Args:
        epoch: Counts the changes, from 1.
        ranks: The member number of each rank.
        history: The changes so far, as this process saw them, the oldest first.

    Example:
        >>> with phalanx.create_communicator(elastic=True) as comm:
        ...     comm.membership.ranks
        (0,)
    """

    epoch: int
    ranks: tuple[int, ...]
    history: tuple[Change, ...] = ()


def _members(numbers: tuple[int, ...]) -> str:
    return f"member{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
