"""Groups of gradients on their way: how one leaves, with which weight, and what it is when it arrives, the mean over ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.arena import Arena
from phalanx.grad.wire import pack, unpack


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One group's way: when it left, when it was over, by `time.perf_counter()`, and how much it carried."""

    left: float
    ended: float
    bytes: int


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that travel together, and where they are on their way."""

    arena: Arena
    flat: torch.Tensor
    params: list[torch.nn.Parameter]
    travels: torch.Tensor  # `flat`, or with double buffering the buffer beside it
    wire: torch.Tensor | None  # the 16-bit companion of `travels`
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
        self._comm, self._weighted = comm, weighted
        self.weight: float = 1.0  # what the gradients of this rank count for in the mean
        self.transfers: list[TransferTime] = []  # of what arrived since they were last taken
        self._total: tuple[torch.Tensor, Pending] | None = None  # the sum of this step's weights, under way
        self._usual: torch.Tensor | None = None  # the sum of an earlier step's weights

    @property
    def counts(self) -> bool:
        """Whether the gradients of this rank are in the mean."""
        return not self._weighted or self.weight > 0

    def leave(self, group: Group, label: str, *, flags: Sequence[bool] = ()) -> None:
        """Start its way; messages meet only those with the same `label`.

        `flags` go along in the last elements, where each ends as something else than 0 if any rank says yes.
        """
        group.left = group.set_out = time.perf_counter()
        x, weighted = group.travels, self._weighted
        if weighted:
            self._weigh(x)
        if flags:
            x[-len(flags) :] = torch.tensor(flags, dtype=x.dtype, device=x.device)
        if group.wire is not None:
            narrow = pack(x, group.wire, 1.0 if weighted else 1 / self._comm.size)
            group.pending = self._comm.all_reduce_async(narrow, label=label)
        else:
            group.pending = self._comm.all_reduce_async(x, op="sum" if weighted else "mean", label=label)

    def _weigh(self, x: torch.Tensor) -> None:
        """Multiply by this rank's share of the samples, as far as it is known: a 16-bit sum of gradient * samples overflows."""
        if self._total is None:
            total = torch.tensor(self.weight, dtype=torch.float64, device=x.device)
            self._total = total, self._comm.all_reduce_async(total)
        if self._usual is None:
            total, pending = self._total
            pending.wait()
            self._usual = _positive(total)
        if self.weight:
            x.mul_((self.weight / self._usual).to(x.device))
        else:
            x.zero_()  # the mean over an empty batch is NaN, and so is 0 * NaN

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
        if group.wire is not None and not unpack(group.wire, group.travels):
            group.overflowed = True
        if self._total is not None and self._usual is not None:
            total, pending = self._total
            pending.wait()
            group.travels.mul_((self._usual / _positive(total)).to(group.travels.device))
        group.landed = True

    def arrive_all(self, groups: Sequence[Group]) -> None:
        """Wait for all that are under way."""
        for group in groups:
            if group.pending is not None:
                self.arrive(group)

    def settle(self) -> None:
        """The step is over: its sum of weights is the next one's guess."""
        if self._total is not None:
            self._usual, self._total = _positive(self._total[0]), None

    @property
    def usual(self) -> float | None:
        """The sum of weights by which those of the next step are divided first: part of how its mean is rounded."""
        known = self._total[0] if self._total is not None else self._usual
        return None if known is None else float(_positive(known))

    @usual.setter
    def usual(self, total: float | None) -> None:
        self._usual = None if total is None else torch.tensor(total, dtype=torch.float64)

    def mean(self, loss: Any) -> Any:
        """The mean of a loss, a number or a tensor with one, over the ranks as the gradients' mean; all ranks call it."""
        if not isinstance(loss, float | int | torch.Tensor):
            return loss
        pair = torch.tensor([float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0], dtype=torch.float64)
        weight = self.weight if self._weighted else 1.0
        pair = pair * weight if weight else torch.zeros_like(pair)
        total, weights = self._comm.all_reduce(pair)
        mean = total / _positive(weights)
        return mean.to(loss) if isinstance(loss, torch.Tensor) else float(mean)


def _positive(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))
