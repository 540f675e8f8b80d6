"""A carrier with 16 bits per gradient: a cast, an all-reduce, and a cast back."""

from __future__ import annotations

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.wire import SumOp, pack, unpack


class Halves:
    """Carries gradients in `wire`, a buffer of 16-bit floats of the same length."""

    keeps_flags = True

    def __init__(self, comm: Communicator, wire: torch.Tensor) -> None:
        self._comm, self._wire = comm, wire

    def leave(self, x: torch.Tensor, op: SumOp, *, label: str) -> Pending:
        return self._comm.all_reduce_async(pack(x, self._wire, 1 / self._comm.size if op == "mean" else 1.0), "sum", label=label)

    def arrive(self, x: torch.Tensor) -> torch.Tensor:
        return unpack(self._wire, x)

    def state(self, place: range) -> dict[str, torch.Tensor]:
        return {}

    def load(self, place: range, state: dict[str, torch.Tensor]) -> None:
        pass
