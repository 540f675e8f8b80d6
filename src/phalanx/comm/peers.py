"""Exchanges tensors and short texts with other ranks, inside an operation."""

from __future__ import annotations

import torch

from phalanx.comm.activity import Activity
from phalanx.comm.failure import CommunicationError
from phalanx.comm.members import Members
from phalanx.comm.transports import Message, Transport
from phalanx.comm.verdict import name_ranks

WINDOW = 32  # peers that a rank exchanges with at a time when it has to reach all of them
DEBUG_TEXT = 240  # bytes of an operation's name that ranks compare under PHALANX_DEBUG


class Peers:
    """The other ranks of one communicator. Only the issuing thread uses it."""

    def __init__(self, members: Members, transport: Transport, activity: Activity) -> None:
        self._members, self._transport, self._activity = members, transport, activity

    def exchange(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], tag: int) -> None:
        """Send and receive tensors by peer, through host memory if the transport cannot carry them directly."""
        transport, ranks = self._transport, self._members.ranks
        via_host = {peer: x for peer, x in receives.items() if not transport.can_carry(x)}
        hosted = {peer: x.cpu() for peer, x in via_host.items()}
        posted = transport.post(
            [Message(ranks[peer], x if transport.can_carry(x) else x.cpu()) for peer, x in sends.items()],
            [Message(ranks[peer], hosted.get(peer, x).view(-1)) for peer, x in receives.items()],
            tag,
        )
        transport.wait(posted)
        for peer, x in via_host.items():
            x.copy_(hosted[peer])
        self._activity.got_on()

    def tell(self, text: str, tag: int) -> list[str]:
        """Exchange texts with all ranks, at most DEBUG_TEXT bytes each. Return them in rank order."""
        rank, size = self._members.rank, self._members.size
        mine = torch.tensor(list(text.encode()[:DEBUG_TEXT].ljust(DEBUG_TEXT)), dtype=torch.uint8)
        texts = {other: mine if other == rank else torch.empty_like(mine) for other in range(size)}
        for first in range(1, size, WINDOW):
            distances = range(first, min(first + WINDOW, size))
            to = {(rank + k) % size: mine for k in distances}
            self.exchange(to, {peer: texts[peer] for k in distances for peer in [(rank - k) % size]}, tag)
        return [bytes(texts[other].tolist()).decode(errors="replace").rstrip() for other in range(size)]

    def agree(self, name: str, number: int, tag: int) -> None:
        """Compare the calls of all ranks, under PHALANX_DEBUG, and raise on all of them if they differ."""
        calls: dict[str, list[int]] = {}
        for rank, text in enumerate(self.tell(name, tag)):
            calls.setdefault(text, []).append(rank)
        if len(calls) > 1:
            majority = max(calls.values(), key=len)  # the first of several equally large groups
            odd = sorted(rank for ranks in calls.values() if ranks is not majority for rank in ranks)
            listed = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in calls.items())
            raise CommunicationError(f"ranks disagree on operation number {number}: {listed}", operation=name, missing=odd)
