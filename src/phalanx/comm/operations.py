"""Who is here, and how a verb becomes an operation: numbered, tagged, watched, run by the issuing thread.

The first of the layers of a communicator: `reductions`, `messages` and `objects` add their verbs to it, `communicator` makes one.
A tag made from number, verb and shape keeps operations apart: ranks that disagree wait for each other in vain, and the watch can
say who called what.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.ending import release
from phalanx.comm.failure import CommunicationError, Watch
from phalanx.comm.hosts import Hosts
from phalanx.comm.issuer import Issuer, Operation, Pending
from phalanx.comm.loans import Loans
from phalanx.comm.streams import Lane
from phalanx.comm.transports import Message, Transport
from phalanx.native.errors import Disagreement
from phalanx.native.team import HostTeam

WINDOW = 32  # peers with whom a rank exchanges at a time where it must talk to all
DEBUG_TEXT = 240  # bytes of an operation's name that ranks compare under PHALANX_DEBUG


class Operations:
    """The ranks of a communicator and their operations, whatever these do."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        me: int,
        transport: Transport,
        issuer: Issuer,
        watch: Watch | None,
        keys: Sequence[str],
        *,
        parent: Operations | None = None,
    ) -> None:
        self._name, self._ranks, self._rank = name, tuple(ranks), me
        self._transport, self._issuer, self._watch, self._parent = transport, issuer, watch, parent
        self._keys = tuple(keys)
        self._hosts = Hosts.of(self._keys)
        self._inter_rank, self._intra_rank = self._hosts.place(me)
        self._number = 0
        self._closed = False
        self._debug = os.environ.get("PHALANX_DEBUG", "") not in ("", "0")
        self._team: HostTeam | None = None  # shared memory with the ranks of this host
        self._leave: Callable[[], Any] | None = None  # gives it up
        self._loans: Loans | None = None

    # ---- who ---------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def intra_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self._intra_rank

    @property
    def intra_size(self) -> int:
        """How many ranks share this host."""
        return len(self._hosts.ranks[self._inter_rank])

    @property
    def inter_rank(self) -> int:
        """The number of this host."""
        return self._inter_rank

    @property
    def inter_size(self) -> int:
        """How many hosts there are."""
        return len(self._hosts.ranks)

    @property
    def patience(self) -> float:
        """Seconds without progress after which a wait is given up: the timeout, less what it takes to find out why."""
        return self._issuer.patience

    # ---- one operation -------------------------------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        work: Callable[[int], Any],
        tensors: Sequence[torch.Tensor] = (),
        pair: tuple[int, int, int] | None = None,
        landing: Callable[[], None] | None = None,
        *,
        may_fail: bool = False,
        compare: bool = False,
    ) -> Pending:
        """Number the operation and queue it. A `pair` (source, dest, tag) has an order of its own and no number.

        With `landing`, `work` only begins it; `landing` waits for its end, in a thread of its own. `compare`: it begins with
        messages, which ranks that call something else would wait for; where all share memory they compare what they call first.
        """
        if self._is_closed():
            raise RuntimeError(f"{name}: this communicator is closed")
        if pair is None:
            self._number += 1
        number = 0 if pair else self._number
        members = {rank: self._ranks[rank] for rank in sorted({self.rank, *pair[:2]})} if pair else self._members()
        tag = tag_of(self._name, number, pair or name)
        check = self._debug and pair is None and self.size > 1
        # a mode is of a thread; the issuing thread takes the caller's, or it could not write to tensors made under it
        inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors)

        def checked() -> Any:
            with torch.inference_mode(inference):
                if check:
                    self._agree(name, number)
                if self._team is None:
                    return work(tag)
                if pair is None:
                    self._team.set_topic(digest_of(name), number, lambda: name)
                    if compare and self.inter_size == 1:
                        self._on_team(self._team.barrier)
                return self._on_team(lambda: work(tag))

        def land() -> None:
            assert landing is not None
            with torch.inference_mode(inference):
                landing()

        then = land if landing else None
        operation = Operation(self._name, number, name, members, checked, Lane(tensors), then, may_fail=may_fail)
        return self._issuer.submit(operation)

    def _on_team(self, work: Callable[[], Any]) -> Any:
        """`work` on shared memory; ranks that called different things are told so, and nothing is broken."""
        try:
            return work()
        except Disagreement as error:
            raise self._disagreement(error) from None

    def _disagreement(self, error: Disagreement) -> CommunicationError:
        host = self._hosts.ranks[self._inter_rank]
        operation = str(error).partition(": ")[0]
        return CommunicationError(str(error), operation=operation, missing=[host[rank] for rank in error.late])

    def _agree(self, name: str, number: int) -> None:
        """Under PHALANX_DEBUG: all ranks tell what they are about to do, and all raise when they differ."""
        calls: dict[str, list[int]] = {}
        for rank, text in enumerate(self._tell(name, tag_of(self._name, number, "agree"))):
            calls.setdefault(text, []).append(rank)
        if len(calls) > 1:
            usual = max(calls.values(), key=len)  # the first of several equally large parties counts as the usual one
            odd = sorted(rank for ranks in calls.values() if ranks is not usual for rank in ranks)
            told = "; ".join(
                f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}" for text, ranks in calls.items()
            )
            raise CommunicationError(f"ranks disagree on operation number {number}: {told}", operation=name, missing=odd)

    def _tell(self, text: str, tag: int) -> list[str]:
        """The texts of all ranks, DEBUG_TEXT bytes of each at most."""
        mine = torch.tensor(list(text.encode()[:DEBUG_TEXT].ljust(DEBUG_TEXT)), dtype=torch.uint8)
        said = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)}
        for first in range(1, self.size, WINDOW):
            distances = range(first, min(first + WINDOW, self.size))
            to = {(self.rank + k) % self.size: mine for k in distances}
            self._exchange(to, {peer: said[peer] for k in distances for peer in [(self.rank - k) % self.size]}, tag)
        return [bytes(said[rank].tolist()).decode(errors="replace").rstrip() for rank in range(self.size)]

    def _members(self) -> dict[int, int]:
        """Rank here -> rank in the world."""
        return dict(enumerate(self._ranks))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _exchange(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], tag: int) -> None:
        via_host = {peer: x for peer, x in receives.items() if not self._transport.can_carry(x)}
        hosted = {peer: x.cpu() for peer, x in via_host.items()}
        posted = self._transport.post(
            [Message(self._ranks[peer], x if self._transport.can_carry(x) else x.cpu()) for peer, x in sends.items()],
            [Message(self._ranks[peer], hosted.get(peer, x).view(-1)) for peer, x in receives.items()],
            tag,
        )
        self._transport.wait(posted)
        for peer, x in via_host.items():
            x.copy_(hosted[peer])
        self._issuer.got_on()

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the communicator; what was queued is finished first. A split one leaves its parent open. Idempotent."""
        if self._closed or self._issuer.is_parents:  # a forked child leaves its parent's alone
            return
        self._closed = True
        if self._parent is not None and self._leave is not None:
            self._leave()
        if self._parent is None:
            self._issuer.stop()
            if self._watch is not None:
                release(self._watch)
                self._watch.stop()
            self._transport.close()
            if self._leave is not None:
                self._leave()

    def part(self) -> None:
        """Leave the job without ending it: an exception of this rank is not told to the others any more. Closes all."""
        if self._parent is not None:
            self._parent.part()
        self.close()

    def _is_closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent._is_closed())


def digest_of(name: str) -> int:
    """64 bits by which ranks that share memory tell operations apart; the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def tag_of(*parts: object) -> int:
    """31 bits, because gloo's tags are signed 32."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
