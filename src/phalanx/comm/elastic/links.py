"""Which hosts to give up when links between them are dead: pure functions of what the agents of all hosts have found.

A rank may reach the meeting point but not another rank. Then all ranks wait for each other in one round, and no sign of life is
missing. So when a round does not progress, every agent asks all others for an answer (echo.py). One of the two hosts at a dead
link is given up, because all survivors must reach each other.

With a link that comes and goes, the job would form new worlds forever. So a host that was given up must wait before it is let in
again, twice as long each time if it soon fails again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

FIRST_WAIT, LONGEST_WAIT = 5.0, 60.0  # seconds outside after a link failed
FORGOTTEN = 10.0  # seconds inside without a failure after which the next one counts as the first

Link = tuple[int, int]  # two agents, the lower number first


def dead_links(unreachable: Mapping[int, tuple[int, ...]]) -> frozenset[Link]:
    """The links at which one side got no answer, among agents that have all reported."""
    return frozenset(
        (min(one, other), max(one, other)) for one, others in unreachable.items() for other in others if other in unreachable
    )


def to_give_up(links: frozenset[Link], ranks: Mapping[int, int], keeper: int) -> list[int]:
    """The agents whose hosts have to go so that all others reach each other. The `keeper` of the meeting point stays.

    The host with the most dead links goes, then the next. On a tie, it is the one with fewer ranks, then the one that came later.
    """
    left, gone = set(links), list[int]()
    while left:
        counts = {agent: sum(agent in link for link in left) for link in left for agent in link if agent != keeper}
        worst = max(counts, key=lambda agent: (counts[agent], -ranks.get(agent, 0), agent))
        gone.append(worst)
        left = {link for link in left if worst not in link}
    return gone


@dataclass(frozen=True, slots=True)
class Ban:
    """How long a host waits outside, how often it had to, and since when it has been inside again."""

    until: float = 0.0
    times: int = 0
    inside: float | None = None

    def let_in(self, now: float) -> Ban:
        return self if self.inside is not None else replace(self, inside=now)

    def again(self, now: float) -> Ban:
        calm = self.inside is not None and now - self.inside > FORGOTTEN
        times = 0 if calm else self.times
        return Ban(now + min(LONGEST_WAIT, FIRST_WAIT * 2.0**times), times + 1)
