"""What the agents of a job write on its board. An agent is the `phalanx run` of one host; one of them holds the board.

    agent/A       agent A has joined: its host, and how many ranks it starts   written by A, once
    member/M      A starts member M                                            written by A, once
    members/A     all members that A has started                               written by A
    ended/M       the process of member M has ended, and how                   written by A
    pulse/A       A is alive, and how many ranks it may still replace          written by A, repeatedly
    probed/P/A    the agents that A could not reach in probe P                 written by A
    left/A        A has ended, and why                                         written by A
    order/K       the K-th order to all agents                                 written by the holder of the board

Agents claim numbers in the store, which lets one claim win. So two agents never have the same number, nor do two ranks.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx.comm.elastic.board import Board

Kind = Literal["begin", "signal", "out", "probe", "over"]
KINDS = ("begin", "signal", "out", "probe", "over")


@dataclass(frozen=True, slots=True)
class Card:
    """How an agent introduces itself. Other agents ask at `address` and `port` whether the link works. No port on one host."""

    host: str
    address: str = ""
    port: int = 0
    ranks: int = 1
    tag: str = ""  # random: two agents of one host have different cards
    process: str = ""  # random: identifies an agent that comes back after it has ended its ranks

    def to_json(self) -> str:
        return json.dumps([self.host, self.address, self.port, self.ranks, self.tag, self.process])

    @staticmethod
    def from_json(text: bytes | str) -> Card:
        host, address, port, ranks, tag, process = json.loads(text)
        return Card(str(host), str(address), int(port), int(ranks), str(tag), str(process))

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


@dataclass(frozen=True, slots=True)
class Order:
    """What all agents must do.

    `begin`: these members have formed the first world, and from now on dead ranks are replaced. `signal` N: pass it on to your
    ranks. `out`: these members are no longer in the job. If `number` is 1, the network was at fault, and a new rank in their
    place does not count.
    `probe` P: report which of `places` you cannot reach. `over`: end with exit code N.
    """

    kind: Kind
    number: int = 0
    members: tuple[int, ...] = ()
    places: tuple[tuple[int, str, int], ...] = ()  # of agents: number, address, port

    def to_json(self) -> str:
        return json.dumps([self.kind, self.number, self.members, self.places])

    @staticmethod
    def from_json(text: bytes | str) -> Order:
        kind, number, members, places = json.loads(text)
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not an order")
        found = tuple((int(agent), str(address), int(port)) for agent, address, port in places)
        return Order(kind, int(number), tuple(map(int, members)), found)


@dataclass(frozen=True, slots=True)
class End:
    """How the process of a member ended."""

    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by signal {-self.code}"
        return f"exited with code {self.code}" if self.code else "finished"


@dataclass
class Host:
    """An agent as the head knows it."""

    card: Card
    heard: float
    count: int = -1
    budget: int = 0
    members: list[int] = field(default_factory=list)
    left: bool = False
    lost: bool = False  # silent for so long that its members were given up; it may come back

    @property
    def here(self) -> bool:
        return not (self.left or self.lost)


class AgentKeys:
    """The keys of agents on a board."""

    def __init__(self, board: Board) -> None:
        self._board, self._keys = board, board.keys

    # ---- an agent writes -------------------------------------------------------------------------------------------------------

    def introduce(self, card: Card) -> int:
        """The number of this agent from now on."""
        return self._claim("agent", card.to_json(), 0)

    def claim_member(self, agent: int, wish: int) -> int:
        """A number for a new rank: `wish`, or the next one that is free."""
        return self._claim("member", f"{agent} {secrets.token_hex(4)}", wish)

    def started(self, agent: int, members: Sequence[int]) -> None:
        self._keys.set(f"members/{agent}", json.dumps(list(members)))
        self._board.ring()

    def ended(self, member: int, end: End) -> None:
        self._keys.set(f"ended/{member}", str(end.code))
        self._board.ring()

    def live(self, agent: int, count: int, budget: int) -> None:
        self._keys.set(f"pulse/{agent}", f"{count} {budget}")

    def answer(self, probe: int, agent: int, unreachable: tuple[int, ...]) -> None:
        self._keys.set(f"probed/{probe}/{agent}", json.dumps(unreachable))
        self._board.ring()

    def leave(self, agent: int, why: str) -> None:
        self._keys.set(f"left/{agent}", why)
        self._board.ring()

    # ---- the holder of the board writes ----------------------------------------------------------------------------------------

    def order(self, number: int, order: Order) -> None:
        self._keys.set(f"order/{number}", order.to_json())

    def forget_probe(self, probe: int, agents: Sequence[int]) -> None:
        for agent in agents:
            self._keys.delete_key(f"probed/{probe}/{agent}")

    # ---- all read --------------------------------------------------------------------------------------------------------------

    def card(self, agent: int) -> Card | None:
        found = self._read(f"agent/{agent}")
        return None if found is None else Card.from_json(found)

    def members(self, agent: int) -> list[int]:
        """All members that this agent has ever started."""
        found = self._read(f"members/{agent}")
        return [] if found is None else [int(member) for member in json.loads(found)]

    def end_of(self, member: int) -> End | None:
        found = self._read(f"ended/{member}")
        return None if found is None else End(int(found))

    def pulse(self, agent: int) -> tuple[int, int] | None:
        """The counter of this agent's signs of life, and its budget."""
        found = self._read(f"pulse/{agent}")
        if found is None:
            return None
        count, budget = found.split()
        return int(count), int(budget)

    def answered(self, probe: int, agent: int) -> tuple[int, ...] | None:
        found = self._read(f"probed/{probe}/{agent}")
        return None if found is None else tuple(map(int, json.loads(found)))

    def has_left(self, agent: int) -> str | None:
        found = self._read(f"left/{agent}")
        return None if found is None else found.decode()

    def order_at(self, number: int) -> Order | None:
        found = self._read(f"order/{number}")
        return None if found is None else Order.from_json(found)

    def _read(self, key: str) -> bytes | None:
        return self._keys.get(key) if self._keys.check([key]) else None

    def _claim(self, kind: str, mine: str, first: int) -> int:
        for number in itertools.count(first):
            if self._keys.compare_set(f"{kind}/{number}", "", mine).decode() == mine:
                self._board.ring()
                return number
        raise AssertionError("there is always a next number")
