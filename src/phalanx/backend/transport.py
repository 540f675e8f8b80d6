"""Messages between the hosts of a group: a gloo group of its own, so that no tag meets one of yours."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.transports import Message, MessagesOnly, TransportError
from phalanx.comm.transports.torch.errors import gist
from phalanx.comm.transports.torch.transport import pieces


class GlooTransport(MessagesOnly):
    """`gloo` is a ProcessGroupGloo of all ranks of the group."""

    address = ""
    device = None

    def __init__(self, gloo: Any, timeout: float) -> None:
        self._gloo, self._limit = gloo, datetime.timedelta(seconds=timeout)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        # receives first: on one gloo pair a send that is posted first makes the exchange half-duplex
        try:
            incoming = [(m.peer, "receive from", self._gloo.recv([x], m.peer, tag)) for m in receives for x in pieces(m.tensor)]
            outgoing = [(m.peer, "send to", self._gloo.send([x], m.peer, tag)) for m in sends for x in pieces(m.tensor)]
        except RuntimeError as error:
            raise TransportError(gist(error)) from error
        return incoming + outgoing

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        peer, way = -1, ""
        try:
            for peer, way, work in posted:  # noqa: B007  they tell where it stopped
                work.wait(self._limit)
        except RuntimeError as error:
            raise TransportError(f"{way} rank {peer}: {gist(error)}") from error

    def can_carry(self, x: torch.Tensor) -> bool:
        return x.is_cpu
