"""A carrier with 8 bits per gradient: the quantised all-reduce of `schedule/quantised.py`. It keeps the rounding errors.

A rank keeps one error per gradient that it encodes. If it sends to the rank that adds, this is the error of its own gradients or
of its host's sums. If it is that rank itself, it is the error of the sum. An error is added to what is encoded next at the same
place, so nothing is lost, only delayed. If groups are sent twice in one step, the error of the second time is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from phalanx.comm.block_code import Coder
from phalanx.comm.communicator import Communicator
from phalanx.comm.compound import Turn
from phalanx.comm.pending import Pending
from phalanx.grad.wire import SumOp
from phalanx.grad.wires import Int8


class EightBits:
    """Carries one group of float32 gradients. `places` are those of the tensors in it; between them is padding."""

    keeps_flags = False

    def __init__(self, wire: Int8, comm: Communicator, flat: torch.Tensor, places: Iterable[range], number: int) -> None:
        self._wire, self._comm, self._number = wire, comm, number
        # An error belongs to a place of the buffer that is cut into chunks, so nobody may pad it later. Gradients do not need it,
        # because their arena is padded. Parts of local steps have any length.
        length = flat.numel() + -flat.numel() % comm.multiple
        self._padded = flat.new_zeros(length) if length > flat.numel() else None
        self._error = flat.new_zeros(length) if wire.error_feedback else None
        padding = torch.ones(length, dtype=torch.bool)
        for place in places:
            padding[place.start : place.stop] = False
        self._padding = padding.nonzero().flatten().to(flat.device)
        self._turn = 0  # how often the group was sent
        self._finite = torch.ones((), dtype=torch.bool, device=flat.device)

    def leave(self, x: torch.Tensor, op: SumOp, *, label: str) -> Pending:
        self._turn += 1
        factor = 1 / self._comm.size if op == "mean" else 1.0
        coder = Coder(self._wire.code, self._error, key=self._key() if self._wire.code.stochastic else 0, factor=factor)
        whole = x.detach()
        if self._padded is not None:
            self._padded[: x.numel()] = whole
            whole = self._padded

        def work(turn: Turn) -> torch.Tensor:
            self._finite = turn.add_up_coded(whole, coder, self._wire.level)
            return x

        return self._comm.compound_async(f"int8({x.numel()}, {label})", work, x)

    def arrive(self, x: torch.Tensor) -> torch.Tensor:
        whole = x if self._padded is None else self._padded
        # a number that is not finite has filled its block, and what stays in the padding would fill it again in every step
        whole.index_fill_(0, self._padding, 0)
        if self._padded is not None:
            x.copy_(whole[: x.numel()])
        return self._finite

    def state(self, place: range) -> dict[str, torch.Tensor]:
        kept = {"turn": torch.tensor(self._turn)} if self._wire.code.stochastic else {}
        return kept if self._error is None else kept | {"error": self._error[place.start : place.stop].clone()}

    def load(self, place: range, state: dict[str, torch.Tensor]) -> None:
        error = state.get("error")
        if self._error is not None and error is not None and error.numel() == len(place):
            self._error[place.start : place.stop] = error
        if "turn" in state:
            self._turn = int(state["turn"])

    def _key(self) -> int:
        """Return a different seed for every rank, group and exchange."""
        text = f"phalanx int8 {self._wire.seed} {self._turn} {self._comm.rank} {self._number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
