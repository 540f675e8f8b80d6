"""Carries one group of gradients as its wire demands, and keeps what the wire needs between steps.

carrier = carrier_of(wire, comm, flat, shapes={range(0, 12): 3, range(12, 16): 1})    # None if it is sent uncompressed
pending = carrier.leave(flat, "mean", label="...")    # all ranks
pending.wait()
finite = carrier.arrive(flat)    # now `flat` is the mean over the ranks, the same bits on all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.wire import SumOp, carries
from phalanx.grad.wires import Int8, PowerSGD, Wire
from phalanx.grad.wires.halves import Halves


class Carrier(Protocol):
    """Sends one group of gradients, a flat tensor, to the other ranks and receives the result."""

    keeps_flags: bool  # whether a 1 among the gradients arrives as something other than 0

    def leave(self, x: torch.Tensor, op: SumOp, *, label: str) -> Pending:
        """Start to sum or average `x` over the ranks. Don't touch `x` until `arrive`."""

    def arrive(self, x: torch.Tensor) -> torch.Tensor:
        """Write the result to `x`, after the wait. Return whether all of it is finite, as a tensor on the device of `x`."""

    def state(self, place: range) -> dict[str, torch.Tensor]:
        """Return what this rank keeps about the gradients at `place`, a whole tensor, for the next exchange."""

    def load(self, place: range, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state` returned, perhaps for another group or run. Missing parts start from scratch."""


def carrier_of(
    wire: Wire | None, comm: Communicator, flat: torch.Tensor, *, shapes: Mapping[range, int], number: int = 0
) -> Carrier | None:
    """Return the carrier for tensors like `flat`, or None if they are sent uncompressed. All ranks call it together.

    `shapes` maps the places of the tensors in `flat` to their rows as a matrix (`rows_of`). `number` distinguishes groups. Both
    are the same on all ranks.
    """
    if wire is None or comm.size == 1:
        return None
    if isinstance(wire, PowerSGD):
        from phalanx.grad.wires.low_rank import LowRank

        return LowRank(wire, comm, flat, shapes) if flat.dtype is torch.float32 else None
    if isinstance(wire, Int8):
        if flat.dtype is not torch.float32 or (wire.level == "host" and comm.inter_size == 1):
            return None
        from phalanx.grad.wires.eight_bits import EightBits  # imported here, because few scripts compress

        return EightBits(wire, comm, flat, shapes, number)
    return Halves(comm, comm.buffer(flat.numel(), wire, flat.device)) if carries(flat) else None


def rows_of(p: torch.Tensor) -> int:
    """Return the rows of a tensor as a matrix whose rows follow each other in memory. Vectors have one row."""
    if p.dim() < 2 or p.numel() == 0:
        return 1
    return p.shape[max(range(p.dim()), key=p.stride)]


def keep(carriers: Sequence[tuple[Carrier | None, dict[str, range]]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return what carriers keep, by the name of the parameter. Each carrier comes with the places of its parameters."""
    kept = {name: carrier.state(place) for carrier, places in carriers if carrier for name, place in places.items()}
    return {name: state for name, state in kept.items() if state}


def give(carriers: Sequence[tuple[Carrier | None, dict[str, range]]], kept: dict[str, dict[str, torch.Tensor]]) -> None:
    """Load into carriers what others kept for the same parameters."""
    for carrier, places in carriers:
        for name, place in places.items():
            if carrier is not None and name in kept:
                carrier.load(place, kept[name])
