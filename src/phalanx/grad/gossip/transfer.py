"""One gossip message each way: sent, awaited for a while, and given up if the partner is dead or too late.

Receive and send are two operations, because they have two partners. A message that was given up may still arrive, so its memory
is kept until then. Its tag has the step, so it is never taken for a later one.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.gossip.kinds import Kinds
from phalanx.grad.gossip.packet import Packet, PacketLayout
from phalanx.grad.gossip.partners import Partners

STUCK = 2  # with this many messages given up but in flight, a peer gets no new ones, so that their memory does not pile up
OWN_TAGS = 1 << 40  # below are the tags of other exchanges on this communicator
CALLS = 1 << 39  # above the steps of all transfers
GIFTS = 1 << 38  # replicas for ranks that were left behind: above them as well
SLICE = 0.05  # seconds between two checks whether a gift may still come
REMEMBERED = 8  # transfers per peer: more than can be unmatched

_serials: weakref.WeakKeyDictionary[Communicator, itertools.count[int]] = weakref.WeakKeyDictionary()


def serial_of(comm: Communicator) -> int:
    """A number for the tags of one more optimizer: all ranks create optimizers in the same order."""
    return next(_serials.setdefault(comm, itertools.count(1)))


@dataclass(slots=True)
class Transfer:
    """A message to `dest` and one from `source`, peers by rank, in flight since `left` (time.perf_counter())."""

    step: int
    partners: Partners  # nodes
    sent: Packet
    received: Packet
    kinds: Kinds  # of the tensors that were packed
    inbound: Pending | None = None
    outbound: Pending | None = None
    source: int | None = None
    dest: int | None = None
    left: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    waited: float = 0.0  # seconds that this rank waited for it
    arrived: bool = False
    dead: set[int] = field(default_factory=set)  # peers whose connection is broken
    late: set[int] = field(default_factory=set)  # peers that were given up
    jammed: set[int] = field(default_factory=set)  # peers that were not tried: too much is in flight to or from them


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Messages of one rank, (step, bytes): `sends` that the other never asked for, and `receives` that it never sent."""

    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Unmatched:
        return Unmatched(*(tuple((int(step), int(size)) for step, size in answer[name]) for name in ("sends", "receives")))

    def to_answer(self) -> dict[str, Any]:
        return {"sends": self.sends, "receives": self.receives}


class Transfers:
    """Starts and lands transfers of one optimizer on `comm`, and keeps their memory."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._serial = serial_of(comm)
        self._calls = 0
        self._spare: list[Packet] = []
        self._stuck: list[Transfer] = []
        self._open: list[Transfer] = []  # all that were started and are not known to be over
        self._flown: dict[tuple[int, str], deque[int]] = {}  # the last steps in which a peer was sent to, or received from
        self._errands: list[tuple[Pending, torch.Tensor]] = []  # what matches the unmatched, and gifts; with their memory

    def call_tag(self) -> int:
        """The first of two tags for a roll call. Calls have the same numbers on all ranks."""
        self._calls += 1
        return self._serial * OWN_TAGS + CALLS + 2 * self._calls

    def packet(self, layout: PacketLayout, device: torch.device) -> Packet:
        """Memory for a message; used memory if there is some."""
        self._reclaim()
        self._spare = [packet for packet in self._spare if packet.layout == layout and packet.words.device == device]
        return self._spare.pop() if self._spare else Packet(layout, device)

    def start(self, transfer: Transfer, part: slice, dest: int | None, source: int | None) -> None:
        """Send `part` of the message to rank `dest` and receive that part from `source`; the receive is posted first."""
        tag = self._serial * OWN_TAGS + transfer.step
        out, into = transfer.sent.words[part], transfer.received.words[part]
        nothing = out[:0]
        if out.is_cuda and dest is not None and source is not None:
            # NCCL needs both in one call, and cannot skip a rank
            transfer.inbound = self._comm.exchange_async(out, dest, into, source, tag)
            return
        transfer.jammed = {peer for peer in (source, dest) if peer is not None and self._jammed(peer)}
        if source is not None and source not in transfer.jammed:
            transfer.source = source
            self._note(source, "receive", transfer.step)
            transfer.inbound = self._comm.exchange_async(nothing, source, into, source, tag, may_fail=True)
        if dest is not None and dest not in transfer.jammed:
            transfer.dest = dest
            self._note(dest, "send", transfer.step)
            transfer.outbound = self._comm.exchange_async(out, dest, nothing, dest, tag, may_fail=True)
        self._open = [own for own in self._open if not _over(own)] + [transfer]

    def land(self, transfer: Transfer, patience: float) -> None:
        """Wait for both, `patience` seconds in all, and note the outcome."""
        begun = time.monotonic()
        if transfer.inbound is not None and transfer.source is None:
            transfer.inbound.wait()
            transfer.arrived = True
        elif transfer.inbound is not None and transfer.source is not None:
            transfer.arrived = self._settled(transfer, transfer.inbound, transfer.source, patience)
        transfer.ended = transfer.inbound.ended if transfer.inbound is not None and transfer.arrived else time.perf_counter()
        if transfer.outbound is not None and transfer.dest is not None:
            self._settled(transfer, transfer.outbound, transfer.dest, max(0.0, patience - (time.monotonic() - begun)))
        transfer.waited += time.monotonic() - begun
        if transfer.late:
            self._stuck.append(transfer)

    def peek(self, transfer: Transfer, patience: float) -> bool:
        """Whether its message arrives within `patience`. It stays in flight until a step lands it."""
        if transfer.inbound is None:
            return False
        if transfer.source is None:
            transfer.inbound.wait()
            return True
        return transfer.inbound.settle(patience) is None

    def release(self, transfer: Transfer) -> None:
        """Its messages are used: take its memory back, unless something may still be written to or read from it."""
        if not transfer.late:
            self._spare += [transfer.sent, transfer.received]

    # ---- what was left over with a rank that was away --------------------------------------------------------------------------

    def unmatched(self, peer: int, before: int) -> Unmatched:
        """The messages to and from `peer`, of earlier steps, that will never arrive. Any thread may ask."""
        transfers = [transfer for transfer in list(self._open) if transfer.step < before]
        size = {transfer.step: transfer.sent.words.nbytes for transfer in transfers}
        waiting = lambda pending: pending is not None and not pending.done()  # noqa: E731
        return Unmatched(
            tuple((own.step, size[own.step]) for own in transfers if own.dest == peer and waiting(own.outbound)),
            tuple((own.step, size[own.step]) for own in transfers if own.source == peer and waiting(own.inbound)),
        )

    def match(self, peer: int, unmatched: Unmatched) -> None:
        """Receive what `peer` sent in vain, and send it zeros for what it waits for in vain, so that its memory becomes free.

        Zeros have no step, so they are not taken for a message. What this side sent or asked for is already matched.
        """
        self._errands = [(pending, x) for pending, x in self._errands if not pending.done()]
        for kind, wanted in (("receive", unmatched.sends), ("send", unmatched.receives)):
            for step, nbytes in wanted:
                if step in self._flown.get((peer, kind), ()):
                    continue
                self._note(peer, kind, step)
                x = torch.zeros(nbytes, dtype=torch.uint8)
                out, into = (x[:0], x) if kind == "receive" else (x, x[:0])
                tag = self._serial * OWN_TAGS + step
                self._errands.append((self._comm.exchange_async(out, peer, into, peer, tag, may_fail=True), x))

    def give(self, packet: Packet, peer: int, ticket: int) -> None:
        """Send a replica to a rank that was left behind, without waiting until it arrives."""
        out = packet.words
        tag = self._serial * OWN_TAGS + GIFTS + ticket
        self._errands.append((self._comm.exchange_async(out, peer, out[:0], peer, tag, may_fail=True), out))

    def accept(self, packet: Packet, peer: int, ticket: int, seconds: float, hopeless: Callable[[], bool]) -> bool:
        """Whether the gift arrived in time. It is given up when it is `hopeless`."""
        into = packet.words
        tag = self._serial * OWN_TAGS + GIFTS + ticket
        pending = self._comm.exchange_async(into[:0], peer, into, peer, tag, may_fail=True)
        until = time.monotonic() + seconds
        while isinstance(error := pending.settle(SLICE), TimeoutError):
            if hopeless() or time.monotonic() > until:
                self._errands.append((pending, into))
                return False
        return error is None

    def _note(self, peer: int, kind: str, step: int) -> None:
        self._flown.setdefault((peer, kind), deque(maxlen=REMEMBERED)).append(step)

    # ---- memory ----------------------------------------------------------------------------------------------------------------

    def _settled(self, transfer: Transfer, pending: Pending, peer: int, seconds: float) -> bool:
        error = pending.settle(seconds)
        if isinstance(error, TimeoutError):
            transfer.late.add(peer)
        elif error is not None:
            transfer.dead.add(peer)
        return error is None

    def _jammed(self, peer: int) -> bool:
        return sum(peer in transfer.late for transfer in self._stuck) >= STUCK

    def _reclaim(self) -> None:
        """Memory of what was given up and has arrived, or failed, meanwhile."""
        for transfer in list(self._stuck):
            if _over(transfer):
                self._stuck.remove(transfer)
                self._spare += [transfer.sent, transfer.received]


def _over(transfer: Transfer) -> bool:
    return all(pending is None or pending.done() for pending in (transfer.inbound, transfer.outbound))
