"""May the side of the meeting point train after a cut? A value: pure functions of which members fell silent, and when.

A member whose agent reported its end is dead. A member that fell silent with its whole host may be dead, or may live behind a cut
of the network. It counts as alive until it is known to have ended. The ranks that are left continue if they are at least half of
all that may live:

    4 hosts, cut 3|1    3 are left, 1 may live elsewhere    continue
                2|2     2 and 2                             continue: only this side has the meeting point
                1|3     1 and 3                             pause, until 2 more ranks have come

Hosts behind one cut do not fall silent at the same moment. So a silent member counts until the others have trained without it for
a while. Then it has left for good, and the next cut is another one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Rule = Literal["majority", "none"]
RULES: tuple[Rule, ...] = ("majority", "none")
ONE_CUT = 10.0  # hosts behind one cut fall silent within this many seconds; the spread of a detection is about 3


@dataclass(frozen=True, slots=True)
class Quorum:
    """The members that may live behind a cut, and when the last of them fell silent."""

    rule: Rule = "majority"
    missing: frozenset[int] = frozenset()
    since: float = 0.0

    @property
    def needs(self) -> int:
        """How many ranks the side of the meeting point needs to train."""
        return len(self.missing) if self.rule == "majority" else 0

    def silent(self, members: Collection[int], now: float) -> Quorum:
        """These members fell silent, with their hosts."""
        return replace(self, missing=self.missing | set(members), since=now) if members else self

    def ended(self, members: Collection[int]) -> Quorum:
        """These members are known to have ended."""
        return replace(self, missing=self.missing.difference(members)) if self.missing else self

    def trains(self, size: int, now: float) -> Quorum:
        """A world of `size` ranks has formed. After a while, new cuts are compared with it."""
        over = self.missing and size >= self.needs and now - self.since > ONE_CUT
        return replace(self, missing=frozenset()) if over else self


# ---- what people read ----------------------------------------------------------------------------------------------------------


def pausing(size: int, needs: int, hosts: Sequence[str], wait: float) -> str:
    """The line when a pause begins."""
    return (
        f"{size} of {size + needs} ranks are left, and the others, on {', '.join(hosts)}, may live behind a cut of the network: "
        f"training pauses until {needs - size} more have come, for at most {wait:g} s (--wait)"
    )


def beginning_again(hosts: Sequence[str], wanted: int, wait: float) -> str:
    """The line when no rank is left, and none is known to have failed."""
    return (
        f"no rank is left: {', '.join(hosts)} fell silent. The job begins again, from the last checkpoint of your script, when "
        f"{wanted} hosts have come, within {wait:g} s (--wait)"
    )


def stopping(wait: float) -> str:
    """The line when the pause was too long."""
    return (
        f"too few ranks have come back within {wait:g} s, so the job stops. Start it again on the hosts that you have: your "
        "script continues from its last checkpoint. With --quorum none a job does not wait for hosts that fall silent"
    )
