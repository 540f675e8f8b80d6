"""Groups of gradients on their way: how one leaves, and what it is when it arrives, the mean over ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.arena import Arena
from phalanx.grad.weights import Weights
from phalanx.grad.wires.carrier import Carrier


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One group's way: when it left, when it was over, by `time.perf_counter()`, and how much it carried."""

    left: float
    ended: float
    bytes: int


class CameBack(Protocol):
    """What looks at a group when it is back."""

    def came_back(self, group: Group, finite: torch.Tensor) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that travel together, and where they are on their way."""

    arena: Arena
    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    travels: torch.Tensor  # `flat`, or with double buffering the buffer beside it
    wire: Carrier | None  # how it travels, if not as it is
    early: bool  # may leave during backward
    missing: int = 0
    left: float | None = None  # when it left, in this step
    left_early: bool = False  # during backward
    set_out: float = 0.0  # the same, but kept until it arrives, which with double buffering is a step later
    pending: Pending | None = None
    surprised: bool = False  # a gradient came after it had left
    overflowed: bool = False
    landed: bool = False  # the mean of what is pending is in `travels` already


class GroupReducer:
    """Averages groups over the ranks of `comm`: alike, or `weighted` by the samples of each rank."""

    def __init__(self, comm: Communicator, *, weighted: bool) -> None:
        self._comm = comm
        self.weights = Weights(comm, by_samples=weighted)
        self.finite: CameBack  # what is asked about the groups that come back; set with them
        self.transfers: list[TransferTime] = []  # of what arrived since they were last taken

    def leave(self, group: Group, label: str, *, flags: Sequence[bool] = ()) -> None:
        """Start its way; messages meet only those with the same `label`.

        `flags` go along in the last elements, where each ends as something else than 0 if any rank says yes.
        """
        x, op = self._load(group, flags)
        send = group.wire.leave if group.wire is not None else self._comm.all_reduce_async
        group.pending = send(x, op, label=label)

    def average(self, group: Group, label: str, *, flags: Sequence[bool] = ()) -> None:
        """Leave and arrive at once, in this thread if ranks share memory. For a group without a wire."""
        x, op = self._load(group, flags)
        self._comm.all_reduce(x, op, label=label)
        self.transfers.append(TransferTime(group.set_out, time.perf_counter(), x.nbytes))
        self.weights.correct(x)

    def _load(self, group: Group, flags: Sequence[bool]) -> tuple[torch.Tensor, Literal["sum", "mean"]]:
        group.left = group.set_out = time.perf_counter()
        x, weighted = group.travels, self.weights.by_samples
        if weighted:
            self.weights.weigh(x)
        if flags:
            x[-len(flags) :] = torch.tensor(flags, dtype=x.dtype, device=x.device)
        return x, "sum" if weighted else "mean"

    def arrive(self, group: Group) -> None:
        """Wait for its mean, which ends its way."""
        self.land(group)
        group.pending, group.landed = None, False

    def land(self, group: Group) -> None:
        """Wait for its mean; it stays pending, for a step that is going to apply it."""
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
        """Wait for all that are under way."""
        for group in groups:
            if group.pending is not None:
                self.arrive(group)
