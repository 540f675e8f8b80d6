"""Broadcast: a header announces the tensor, then its bytes follow along a tree or, if they are many, in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.comm.arguments import check_in_place, check_rank, check_tensor, text_of
from phalanx.comm.envelope import HEADER, announced, bytes_of, describes, header_of, plain
from phalanx.comm.failure import CommunicationError
from phalanx.comm.operations import Operations
from phalanx.comm.runner import Runner
from phalanx.native.core import TYPES
from phalanx.schedule import Schedule, binomial, scatter_gather

BCAST_TREE = 64 << 10  # bytes up to which a broadcast sends the whole tensor along a tree instead of in parts


class Broadcast:
    """The broadcasts of one communicator."""

    def __init__(self, operations: Operations, runner: Runner) -> None:
        self._operations, self._runner = operations, runner
        self._schedules: dict[tuple[str, int], Schedule] = {}

    def bcast(self, x: torch.Tensor | None, root: int) -> torch.Tensor:
        members, transport = self._operations.members, self._operations.transport
        check_rank(root, "root", members.size)
        if members.rank == root or x is not None:
            check_tensor(x)
        if x is not None and members.rank != root:
            check_in_place(x)
        device = transport.device if x is None or not x.is_cuda else x.device

        def work(tag: int) -> torch.Tensor:
            header = header_of(x) if members.rank == root and x is not None else torch.empty(HEADER, dtype=torch.int64)
            self._spread(header, root, tag)
            self._check_offers(x, header, root, tag)
            out = x.detach() if x is not None and describes(header, x) else announced(header, device)
            flat = plain(out if transport.can_carry(out) else out.cpu()).view(-1)
            self._spread(bytes_of(flat), root, tag)
            if members.rank != root and flat.data_ptr() != out.data_ptr():
                out.copy_(flat.view(out.shape))
            if x is None:
                return out
            if not describes(header, x):  # raise only now: the others needed this rank's part
                raise ValueError(_misfit([members.rank], [text_of(x)], root, text_of(out)))
            return x

        return self._operations.start(f"bcast(root {root})", work, [] if x is None else [x], device=device).wait()

    def _spread(self, flat: torch.Tensor, root: int, tag: int) -> None:
        """Copy a flat buffer of `root` to all ranks, in place."""
        team = self._operations.team_of_all
        if team is not None and flat.is_cpu and flat.dtype in TYPES:
            team.broadcast(flat, root)
        elif flat.nbytes <= BCAST_TREE or self._operations.members.size == 2:
            self._runner.run(self._schedule(binomial, root), flat, "sum", tag)
        else:
            self._runner.run(self._schedule(scatter_gather, root), flat, "sum", tag)

    def _check_offers(self, x: torch.Tensor | None, header: torch.Tensor, root: int, tag: int) -> None:
        """Raise on all ranks if any of them passed a tensor that does not match the root's.

        Checked only if ranks share memory, where it costs little, and under PHALANX_DEBUG.
        """
        fits = x is None or describes(header, x)
        offer = "" if fits or x is None else text_of(x)
        team, members = self._operations.team_of_all, self._operations.members
        if team is not None:
            if team.all_reduce(torch.tensor([fits], dtype=torch.uint8), "min").item():
                return
            offers = team.tell(offer)
        elif self._operations.debug and members.size > 1:
            offers = self._operations.peers.tell(offer, tag)
        else:
            return
        odd = [rank for rank in range(members.size) if offers[rank]]
        if not odd:
            return
        words = _misfit(odd, [offers[rank] for rank in odd], root, text_of(announced(header, torch.device("meta"))))
        if not fits:
            raise ValueError(words)
        raise CommunicationError(words, operation=f"bcast(root {root})", missing=odd)

    def _schedule(self, make: Callable[[int, int], Schedule], root: int) -> Schedule:
        key = (make.__name__, root)
        if key not in self._schedules:
            self._schedules[key] = make(self._operations.members.size, root)
        return self._schedules[key]


def _misfit(ranks: Sequence[int], offers: Sequence[str], root: int, sent: str) -> str:
    offered = "; ".join(f"rank {rank} offered {offer} to fill" for rank, offer in zip(ranks, offers))
    return f"bcast: root {root} sent {sent}, but {offered}"
