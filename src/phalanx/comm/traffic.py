"""Records which messages a rank has posted and which it waits for, so that an error can name a link that moves no data.

gloo does not report whether a message was sent, but the ranks can compare. If rank 3 waits for the first message of a tag from
rank 1, rank 1 has posted it, and no data is moving, then the link between them is at fault, and neither rank is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

TAGS = 256  # the newest (way, peer, tag) to remember; an operation has only a few tags
REPORTED = 64  # the most to report: a rank that talks to hundreds at once is not compared link by link


class Way(str, Enum):
    """The direction of a message, seen from this rank."""

    SEND = "send"
    RECEIVE = "receive"

    @property
    def opposite(self) -> Way:
        return Way.RECEIVE if self is Way.SEND else Way.SEND


class Ticket(NamedTuple):
    """Message number `number` of those with this direction, peer and tag. Peers are ranks of the world."""

    way: Way
    peer: int
    tag: int
    number: int


class Traffic:
    """Counts messages as they are posted, and remembers the one that each thread waits for."""

    def __init__(self) -> None:
        self._posted: OrderedDict[tuple[Way, int, int], int] = OrderedDict()
        self._open: dict[int, Ticket] = {}

    def post(self, way: Way, peer: int, tag: int) -> Ticket:
        """Count a message that is posted to the network."""
        key = way, peer, tag
        number = self._posted.get(key, 0)
        self._posted[key] = number + 1
        if len(self._posted) > TAGS:
            self._posted.popitem(last=False)
        return Ticket(way, peer, tag, number)

    def wait(self, ticket: Ticket) -> None:
        """Note that the calling thread now waits for this message. After a failed wait it stays: this rank is stuck in it."""
        self._open[threading.get_ident()] = ticket

    def arrived(self) -> None:
        self._open.pop(threading.get_ident(), None)

    def report(self) -> tuple[tuple[Ticket, ...], tuple[Ticket, ...]]:
        """Return the messages that threads wait for, and the count (as `number`) of those posted by way, peer and tag."""
        posted = [Ticket(*key, count) for key, count in list(self._posted.items())]
        return tuple(self._open.copy().values()), tuple(posted[-REPORTED:])
