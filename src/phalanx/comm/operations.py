"""Turns a verb into an operation: gives it a number and a tag, and hands it to the issuing thread.

The tag is made from number, verb and shape. Ranks that call different operations wait for different tags, so no message ends up
in the wrong buffer, and the failure watch can report which rank called what.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.failure import CommunicationError
from phalanx.comm.issuer import Issuer
from phalanx.comm.members import Members
from phalanx.comm.peers import Peers
from phalanx.comm.pending import Operation, Pending
from phalanx.comm.streams import StreamOrder
from phalanx.comm.transports import Transport
from phalanx.native.errors import Disagreement
from phalanx.native.team import HostTeam


class Operations:
    """The operations of one communicator. `team` is the shared memory of this host's ranks, if they have any."""

    def __init__(
        self,
        members: Members,
        transport: Transport,
        issuer: Issuer,
        *,
        team: HostTeam | None = None,
        parent: Operations | None = None,
    ) -> None:
        self.members, self.transport, self.issuer, self.team = members, transport, issuer, team
        self.peers = Peers(members, transport, issuer.activity)
        self.number = 0  # of the latest operation that all ranks take part in
        self.debug = os.environ.get("PHALANX_DEBUG", "") not in ("", "0")
        self._parent = parent
        self.closed_itself = False

    @property
    def closed(self) -> bool:
        """Whether this communicator, or the one it was split from, was closed."""
        return self.closed_itself or (self._parent is not None and self._parent.closed)

    @property
    def team_of_all(self) -> HostTeam | None:
        """The shared memory, if all ranks are on this host."""
        return self.team if self.members.inter_size == 1 else None

    def start(
        self,
        name: str,
        work: Callable[[int], Any],
        tensors: Sequence[torch.Tensor] = (),
        pair: tuple[int, int, int] | None = None,
        landing: Callable[[], None] | None = None,
        *,
        may_fail: bool = False,
        compare: bool = False,
        queued: bool = False,
        device: torch.device | None = None,
    ) -> Pending:
        """Number the operation and queue it. A `pair` (source, dest, tag) keeps its own order and has no number.

        With `landing`, `work` only begins the operation, and `landing` waits for its end in a separate thread. Set `compare` when
        the operation begins with messages: ranks that share memory then compare their calls first, because a rank that calls
        something else would wait until the timeout. Set `queued` when `work` never blocks if NCCL carries the tensors: then the
        calling thread does it. `device` is where results may appear if no tensor says it.
        """
        if self.closed:
            raise RuntimeError(f"{name}: this communicator is closed")
        members = self.members
        if pair is None:
            self.number += 1
        number = 0 if pair else self.number
        taking_part = {rank: members.ranks[rank] for rank in sorted({members.rank, *pair[:2]})} if pair else members.in_world
        tag = tag_of(members.name, number, pair or name)
        check = self.debug and pair is None and members.size > 1
        carried = self.transport.library and bool(tensors) and all(x.is_cuda and self.transport.can_carry(x) for x in tensors)
        here = queued and carried and not self.debug
        # inference mode belongs to a thread: without the caller's mode the issuing thread could not write to the caller's tensors
        inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors)

        def checked() -> Any:
            with torch.inference_mode(inference):
                if check:
                    self.peers.agree(name, number, tag_of(members.name, number, "agree"))
                if self.team is None or here:
                    return work(tag)
                try:
                    if pair is None:
                        self.team.set_topic(digest_of(name), number, lambda: name)
                        if compare and self.team_of_all is not None:
                            self.team.barrier()
                    return work(tag)
                except Disagreement as error:
                    raise self.disagreement(name, error) from None

        def land() -> None:
            assert landing is not None
            with torch.inference_mode(inference):
                landing()

        then = land if landing and not here else None
        order = StreamOrder(tensors, device)
        operation = Operation(members.name, number, name, taking_part, checked, order, then, may_fail=may_fail)
        return self.issuer.device.queue(operation) if here else self.issuer.submit(operation)

    @property
    def may_run_here(self) -> bool:
        """Whether the calling thread may do an operation itself: nothing is queued, and no debugging compares the calls."""
        return not self.debug and self.issuer.idle and not self.closed

    def run_here(self, name: Callable[[], str], work: Callable[[int, Callable[[], Operation]], Any]) -> Any:
        """Do `work(number, describe)` in this thread: waking another one takes longer than a few KiB in shared memory."""
        self.number += 1
        number, members = self.number, self.members

        def describe() -> Operation:  # keeps no tensor and no team alive
            return Operation(members.name, number, name(), members.in_world, lambda: None, StreamOrder())

        try:
            return self.issuer.directly(lambda: work(number, describe), describe)
        except Disagreement as error:
            raise self.disagreement(name(), error) from None

    def disagreement(self, name: str, error: Disagreement) -> CommunicationError:
        """Ranks of this host called different things. Nothing was sent and nothing is broken."""
        host = self.members.on_this_host
        return CommunicationError(str(error), operation=name, missing=[host[rank] for rank in error.late])


def digest_of(name: str) -> int:
    """64 bits by which ranks that share memory tell operations apart; the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def tag_of(*parts: object) -> int:
    """31 bits, because gloo's tags are signed 32-bit numbers."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
