"""When to ask all agents about their links, and what their answers mean over time. The head calls `look` repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phalanx.comm.elastic.agents import AgentKeys, Card, Order
from phalanx.comm.elastic.links import Link, dead_links

ANSWERS = 2.5  # seconds for the answers to a probe; an agent that gives none is judged by its silence
PAUSE = 0.2  # seconds between two probes that find dead links: two in a row confirm them
CALM = 1.0  # the same while all links work
FRESH = 3.0  # seconds for which an answer stays valid


class Probing:
    """One probe after the other, as long as they are wanted."""

    def __init__(self, keys: AgentKeys, order: Callable[[Order], None]) -> None:
        self._keys, self._order = keys, order
        self._number = 0
        self._asked: dict[int, Card] = {}  # by the probe under way
        self._since = 0.0
        self._next = 0.0
        self._dead: frozenset[Link] = frozenset()  # in the last probe
        self._answers: dict[int, tuple[int, ...]] = {}
        self._answered = float("-inf")

    def look(self, now: float, agents: Mapping[int, Card], *, wanted: bool) -> frozenset[Link]:
        """Links that were dead in two probes in a row; none otherwise."""
        if self._asked:
            return self._collect(now)
        if not wanted or len(agents) < 2:
            self._dead = frozenset()
        elif now >= self._next:
            self._number += 1
            self._asked, self._since = dict(agents), now
            places = tuple((agent, card.address, card.port) for agent, card in agents.items())
            self._order(Order("probe", self._number, places=places))
        return frozenset()

    def _collect(self, now: float) -> frozenset[Link]:
        found = {agent: self._keys.answered(self._number, agent) for agent in self._asked}
        if any(answer is None for answer in found.values()) and now - self._since < ANSWERS:
            return frozenset()
        answers = {agent: answer for agent, answer in found.items() if answer is not None}
        self._keys.forget_probe(self._number, list(self._asked))
        before, self._dead = self._dead, dead_links(answers)
        self._answers, self._answered, self._asked = answers, now, {}
        self._next = now + (PAUSE if self._dead else CALM)
        return before & self._dead

    def reaches(self, agent: int, others: set[int], now: float) -> bool:
        """Whether the links of this agent to the others are known to work."""
        if now - self._answered > FRESH or not {agent, *others} <= self._answers.keys():
            return False
        return not any(agent in link and set(link) & others for link in self._dead)
