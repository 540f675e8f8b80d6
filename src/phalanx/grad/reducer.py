"""Send a group of gradients, and make it the mean over the ranks when it comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.arena import Arena
from phalanx.grad.flags import WEIGHT
from phalanx.grad.weights import Weights
from phalanx.grad.wire import SumOp
from phalanx.grad.wires.carrier import Carrier


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One transfer of a group: when it began, when it ended (both by `time.perf_counter()`), and its bytes."""

    left: float
    ended: float
    bytes: int


class CameBack(Protocol):
    """Looks at a group when its mean has come back."""

    def came_back(self, group: Group, finite: torch.Tensor) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that are sent together, and the state of their transfer."""

    arena: Arena
    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    travels: torch.Tensor  # `flat`, or with double buffering the buffer beside it
    wire: Carrier | None  # how it is compressed; None sends it as it is
    early: bool  # may be sent during backward
    missing: int = 0
    left: float | None = None  # when it was sent, in this step
    left_early: bool = False  # whether that was during backward
    set_out: float = 0.0  # the same as `left`, but kept until the mean arrives, which is a step later with double buffering
    pending: Pending | None = None
    surprised: bool = False  # a gradient came after it was sent
    overflowed: bool = False
    landed: bool = False  # the mean is in `travels` already, though the group is still pending


class GroupReducer:
    """Averages groups over the ranks of `comm`, with equal weights or `weighted` by the samples of each rank."""

    def __init__(self, comm: Communicator, *, weighted: bool) -> None:
        self._comm = comm
        self.weights = Weights(comm, by_samples=weighted)
        self.finite: CameBack  # looks at the groups that come back; set together with the groups
        self.transfers: list[TransferTime] = []  # of the groups that arrived since the list was last taken

    def leave(self, group: Group, label: str, *, flags: Sequence[bool] = ()) -> None:
        """Send the group. Messages match only messages with the same `label`.

        `flags` are sent in the last elements. A flag comes back nonzero if any rank has set it.
        """
        x, op = self._load(group, flags)
        send = group.wire.leave if group.wire is not None else self._comm.all_reduce_async
        group.pending = send(x, op, label=label)

    def average(self, group: Group, label: str, *, flags: Sequence[bool] = ()) -> None:
        """Send the group and wait for its mean, in this thread if ranks share memory. The group must have no wire."""
        x, op = self._load(group, flags, along=WEIGHT)
        self._comm.all_reduce(x, op, label=label)
        self.transfers.append(TransferTime(group.set_out, time.perf_counter(), x.nbytes))
        self.weights.correct(x)

    def _load(self, group: Group, flags: Sequence[bool], *, along: int | None = None) -> tuple[torch.Tensor, SumOp]:
        group.left = group.set_out = time.perf_counter()
        x, weighted = group.travels, self.weights.by_samples
        if weighted:
            self.weights.weigh(x, along=along)
        if flags:
            x[-len(flags) :] = torch.tensor(flags, dtype=x.dtype, device=x.device)
        return x, "sum" if weighted else "mean"

    def arrive(self, group: Group) -> None:
        """Wait for the mean and end the transfer."""
        self.land(group)
        group.pending, group.landed = None, False

    def land(self, group: Group) -> None:
        """Wait for the mean. The group stays pending until a step applies it."""
        assert group.pending is not None
        if group.landed:
            return
        group.pending.wait()
        self.transfers.append(TransferTime(group.set_out, group.pending.ended, group.flat.nbytes))
        if group.wire is not None:
            self.finite.came_back(group, group.wire.arrive(group.travels))
        self.weights.correct(group.travels)
        group.landed = True

    def arrive_all(self, groups: Sequence[Group]) -> None:
        """Wait for all groups in flight."""
        for group in groups:
            if group.pending is not None:
                self.arrive(group)
