"""The communicator of an elastic job: the verbs of every communicator. Each verb is a round (rounds.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from phalanx.comm.arguments import check_rank
from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.passage import Passage
from phalanx.comm.elastic.rounds import Rounds
from phalanx.comm.failure import CommunicationError
from phalanx.comm.reductions import ReduceOp

T = TypeVar("T")


class ElasticCommunicator(Rounds):
    """Made by `create_communicator(elastic=True)` under `phalanx run`."""

    def __init__(self, passage: Passage) -> None:
        super().__init__(passage)
        self.in_flight = 0  # exchanges that were sent in one step, and are committed in a later one
        self._landings: list[weakref.WeakMethod[Callable[..., None]]] = []

    def on_landing(self, land: Callable[..., None]) -> None:
        """Call the method `land(at_end=...)` when exchanges in flight have to be committed. All ranks register the same ones.

        This does not keep its owner alive. `at_end`: the epoch has no samples left.
        """
        self._landings.append(weakref.WeakMethod(land))

    def land(self, *, at_end: bool = False) -> None:
        """Commit what is in flight. All ranks call it at the same place of the program."""
        if self._inside or self.is_new:
            return
        self._landings = [method for method in self._landings if method() is not None]
        for method in self._landings:
            if (land := method()) is not None:
                land(at_end=at_end)

    @property
    def least(self) -> int:
        """The fewest ranks that the job wants: `min_ranks`."""
        return self._passage.ready.least

    def as_one(self, work: Callable[[], T], *, counts: bool = False) -> T:
        self.land()
        return self.round(work, counts=counts)

    def has_left(self, member: int) -> bool:
        newest = self._passage.guard.newest
        return newest is not None and member not in newest.members

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum", *, label: str = "") -> torch.Tensor:
        if self._inside or self.is_new:
            return super().all_reduce(x, op, label=label)
        mine = x.detach().clone()
        reduce = super().all_reduce
        return self.round(lambda: reduce(x, op, label=label), lambda: _restore(x, mine))

    def barrier(self) -> None:
        self.round(super().barrier)

    def allgather(self, x: torch.Tensor) -> list[torch.Tensor]:
        gather = super().allgather
        return self.round(lambda: gather(x))

    def bcast(self, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
        cast = super().bcast
        return self._from_root(root, lambda now: cast(x, now))

    def bcast_obj(self, obj: Any, root: int = 0) -> Any:
        cast = super().bcast_obj
        return self._from_root(root, lambda now: cast(obj, now))

    def _from_root(self, root: int, cast: Callable[[int], T]) -> T:
        """Repeated as long as the member that is `root` now is a rank: the others may have nothing to send."""
        check_rank(root, "root", self.size)
        member = self.membership.ranks[root]

        def work() -> T:
            ranks = self.membership.ranks
            if member not in ranks:
                what = f"bcast(root {root})"
                raise CommunicationError(
                    f"{what}: member {member}, the root, has left, and this operation is not repeated without it",
                    operation=what,
                    missing=[root],
                )
            return cast(ranks.index(member))

        return self.round(work)

    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        gather = super().gather
        return self._once(f"gather(root {root})", lambda: gather(x, root))

    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        scatter = super().scatter
        return self._once(f"scatter(root {root})", lambda: scatter(xs, root))

    def alltoall(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        exchange = super().alltoall
        return self._once("alltoall()", lambda: exchange(xs))

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        reduce = super().reduce_scatter
        return self._once("reduce_scatter()", lambda: reduce(x, op))

    def _once(self, what: str, work: Callable[[], T]) -> T:
        """Not repeated, because its arguments fit only the world of this call. In another world all ranks raise.

        So a rank that comes late, and knows of the death, raises as those do that waited.
        """
        before = self.membership

        def here() -> T:
            now = self.membership
            if now.epoch != before.epoch:
                left = [rank for rank, member in enumerate(before.ranks) if member not in now.ranks]
                lost = ", ".join(f"member {before.ranks[rank]}" for rank in left) or "a connection"
                raise CommunicationError(
                    f"{what} lost {lost}; the world has {self.size} ranks now, and this operation is not repeated among them",
                    operation=what,
                    missing=left,
                )
            return work()

        return self.round(here)

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        make = super().buffer
        return self.round(lambda: make(numel, dtype, device))

    def split(self, color: int, key: int = 0) -> Communicator:
        raise ValueError("an elastic communicator cannot be split: the ranks of a part could not agree without the others")


def _restore(x: torch.Tensor, mine: torch.Tensor) -> None:
    with torch.no_grad():
        x.copy_(mine)
