"""One part of the parameters in flight: this rank sends how far it has come, and gets the mean over the ranks.

slow       the outer parameters, as the last outer step left them            fast    the parameters that the rank trains
It sends slow - fast, the pseudo-gradient. With one random partner, it also sends slow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.gossip.packet import Packet, lay_out
from phalanx.grad.groups import even
from phalanx.grad.reducer import TransferTime
from phalanx.grad.wires import Int8, Wire
from phalanx.grad.wires.carrier import Carrier

TAGS = 3 << 50  # of messages to one partner; those of gossip are below
PIECE = 16 << 20  # maximum bytes of one of the all-reduces that send a part; a larger tensor has its own


class Flight:
    """One part in flight since inner step `left`. `fast` and `slow` are the tensors of the part.

    `both`: slow is sent, too. `travels`: `fast` moves on meanwhile, so what was sent is kept.
    """

    def __init__(
        self, left: int, fast: Sequence[torch.Tensor], slow: Sequence[torch.Tensor], *, both: bool, travels: bool
    ) -> None:
        self.left, self.set_out = left, time.perf_counter()
        self.sent = [x.clone() for x in fast] if travels else []
        self._fast, self._slow = fast, slow
        tensors = [*slow, *slow] if both else list(slow)
        self.packet = Packet(lay_out(tensors, None), slow[0].device, filled=True)
        self.count = len(slow)
        self.finite = True
        self.took: TransferTime | None = None  # once it has landed
        self._carried: list[tuple[Carrier, torch.Tensor]] = []
        self._nbytes = self.packet.words.nbytes
        self._pending: list[Pending] = []
        self._theirs: Packet | None = None

    @property
    def segments(self) -> list[torch.Tensor]:
        """What is sent: a flat tensor per type."""
        return [self.packet.words.view(dtype)[begin:end] for dtype, begin, end in self.packet.layout.segments]

    def to_all(self, comm: Communicator, carriers: Sequence[Carrier | None], wire: Wire | None, label: str) -> None:
        """Send to all; the mean over all ranks comes back. Each of `segments` has its carrier, or None to be sent as it is."""
        self._nbytes = 0
        for flat, (dtype, begin, _), carrier in zip(self.segments, self.packet.layout.segments, carriers, strict=True):
            own = [i for i, slot in enumerate(self.packet.layout.slots) if slot.wire == dtype]
            if carrier is None:
                for run in even([self.packet.views[i].nbytes for i in own], PIECE):  # one travels while the next is computed
                    piece = [own[k] for k in run]
                    self._compute(piece)
                    first, last = (self.packet.layout.slots[i].start - begin for i in (piece[0], piece[-1]))
                    sent = flat[first : last + self.packet.views[piece[-1]].numel()]
                    self._pending.append(comm.all_reduce_async(sent, "mean", label=label))
                self._nbytes += flat.nbytes
            else:
                self._compute(own)
                self._pending.append(carrier.leave(flat, "mean", label=label))
                self._carried.append((carrier, flat))
                self._nbytes += wire.code.nbytes(flat.numel()) if isinstance(wire, Int8) else 2 * flat.numel()

    def _compute(self, which: Iterable[int]) -> None:
        """Compute these of the numbers that are sent."""
        for i in which:
            if i < self.count:
                torch.sub(self._slow[i], self._fast[i], out=self.packet.views[i])
            else:
                self.packet.views[i].copy_(self._slow[i - self.count])

    def to_nobody(self) -> None:
        """No rank is left for this one: the result is its own."""
        self._compute(range(len(self.packet.views)))

    def to_one(self, comm: Communicator, partner: int, number: int) -> None:
        """Send to `partner`, and receive what it sends."""
        self._compute(range(len(self.packet.views)))
        self._theirs = Packet(self.packet.layout, self.packet.words.device)
        tag = TAGS + number
        self._pending.append(comm.exchange_async(self.packet.words, partner, self._theirs.words, partner, tag))

    def land(self) -> None:
        """Wait until it has arrived. It stays until a step applies it."""
        if not self._pending:
            return
        for pending in self._pending:
            pending.wait()
        ended = max(pending.ended for pending in self._pending)
        self._pending = []
        for carrier, flat in self._carried:
            self.finite = bool(carrier.arrive(flat)) and self.finite
        self._carried = []
        if self._theirs is not None:
            for mine, other in zip(self.packet.views, self._theirs.views):
                mine.add_(other).mul_(0.5)
            self._theirs = None
        self.took = TransferTime(self.set_out, ended, self._nbytes)

    @property
    def means(self) -> list[torch.Tensor]:
        """The mean pseudo-gradients."""
        return self.packet.views[: self.count]

    @property
    def slow_means(self) -> list[torch.Tensor]:
        """The means of the outer parameters, if they were sent."""
        return self.packet.views[self.count :]

    def state_dict(self) -> dict[str, Any]:
        """The part as it is after landing."""
        self.land()
        return {"left": self.left, "words": self.packet.words.clone(), "sent": [x.clone() for x in self.sent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = int(state["left"])
        self.packet.words.copy_(state["words"])
        for x, saved in zip(self.sent, state["sent"], strict=True):
            x.copy_(saved)


def partner_of(rank: int, size: int, seed: int, number: int) -> int | None:
    """The rank that `rank` meets in round `number`, None if it is left over. All ranks draw the same pairs."""
    draw = random.Random(f"phalanx local {seed} {number} {size}").random
    order = sorted(range(size), key=lambda _: draw())
    place = order.index(rank)
    other = place ^ 1
    return order[other] if other < size else None
