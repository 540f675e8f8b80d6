"""One part of the parameters on its way: how far this rank has come leaves, and the mean over the ranks arrives.

slow       the outer parameters, as the last outer step left them            fast    the parameters that the rank trains
what leaves is slow - fast, the pseudo-gradient. With one random partner, slow goes along.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.gossip.packet import Packet, lay_out
from phalanx.grad.reducer import TransferTime
from phalanx.grad.wire import carries, pack, unpack

TAGS = 3 << 50  # of messages to one partner; those of gossip are below


class Flight:
    """One part under way since inner step `left`. `fast` and `slow` are the tensors of the part."""

    def __init__(self, left: int, fast: Sequence[torch.Tensor], slow: Sequence[torch.Tensor], *, both: bool) -> None:
        self.left, self.set_out = left, time.perf_counter()
        self.sent = [x.clone() for x in fast]
        tensors = [*slow, *slow] if both else list(slow)
        self.packet = Packet(lay_out(tensors, None), slow[0].device)
        self.count = len(slow)
        for view, outer, inner in zip(self.packet.views, slow, fast):
            torch.sub(outer, inner, out=view)
        for view, outer in zip(self.packet.views[self.count :], slow):
            view.copy_(outer)
        self.finite = True
        self._wires: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending: list[Pending] = []
        self._theirs: Packet | None = None

    def to_all(self, comm: Communicator, wire: torch.dtype | None, label: str) -> None:
        """Leave; the mean over all ranks comes back."""
        for dtype, begin, end in self.packet.layout.segments:
            flat = self.packet.words.view(dtype)[begin:end]
            if wire is not None and carries(flat):
                narrow = pack(flat, torch.empty(len(flat), dtype=wire, device=flat.device), 1 / comm.size)
                self._wires.append((narrow, flat))
                self._pending.append(comm.all_reduce_async(narrow, "sum", label=label))
            else:
                self._pending.append(comm.all_reduce_async(flat, "mean", label=label))

    def to_one(self, comm: Communicator, partner: int, number: int) -> None:
        """Leave for `partner`, whose own comes."""
        self._theirs = Packet(self.packet.layout, self.packet.words.device)
        tag = TAGS + number
        self._pending.append(comm.exchange_async(self.packet.words, partner, self._theirs.words, partner, tag))

    def land(self) -> TransferTime | None:
        """Wait until it has arrived; it stays, for a step that applies it. What it took, the first time."""
        if not self._pending:
            return None
        for pending in self._pending:
            pending.wait()
        ended = max(pending.ended for pending in self._pending)
        self._pending = []
        for narrow, flat in self._wires:
            self.finite = bool(unpack(narrow, flat)) and self.finite
        nbytes = sum(narrow.nbytes for narrow, _ in self._wires) or self.packet.words.nbytes
        self._wires = []
        if self._theirs is not None:
            for mine, other in zip(self.packet.views, self._theirs.views):
                mine.add_(other).mul_(0.5)
            self._theirs = None
        return TransferTime(self.set_out, ended, nbytes)

    @property
    def means(self) -> list[torch.Tensor]:
        """The mean pseudo-gradients."""
        return self.packet.views[: self.count]

    @property
    def slow_means(self) -> list[torch.Tensor]:
        """The means of the outer parameters, where they went along."""
        return self.packet.views[self.count :]

    def state_dict(self) -> dict[str, Any]:
        """As it is after landing."""
        self.land()
        return {"left": self.left, "words": self.packet.words.clone(), "sent": [x.clone() for x in self.sent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = int(state["left"])
        self.packet.words.copy_(state["words"])
        for x, saved in zip(self.sent, state["sent"], strict=True):
            x.copy_(saved)


def partner_of(rank: int, size: int, seed: int, number: int) -> int | None:
    """The rank that `rank` meets in round `number`: all pairs are drawn alike; None for the one that is left over."""
    draw = random.Random(f"phalanx local {seed} {number} {size}").random
    order = sorted(range(size), key=lambda _: draw())
    place = order.index(rank)
    other = place ^ 1
    return order[other] if other < size else None
