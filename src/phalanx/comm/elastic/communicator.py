"""The communicator of an elastic job: the verbs of every communicator. Each verb is a round (rounds.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.passage import Passage
from phalanx.comm.elastic.rounds import Rounds
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
        mine = None if x is None else x.detach().clone()
        again = (lambda: _restore(x, mine)) if x is not None and mine is not None else (lambda: None)
        # every rank has something to send, so any rank can be the root after a change
        return self.round(lambda: cast(x, root), again, repeats=x is not None)

    def bcast_obj(self, obj: Any, root: int = 0) -> Any:
        cast = super().bcast_obj
        return self.round(lambda: cast(obj, root))

    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        gather = super().gather
        return self.round(lambda: gather(x, root), repeats=False)

    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        scatter = super().scatter
        return self.round(lambda: scatter(xs, root), repeats=False)

    def alltoall(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        exchange = super().alltoall
        return self.round(lambda: exchange(xs), repeats=False)

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        reduce = super().reduce_scatter
        return self.round(lambda: reduce(x, op), repeats=False)

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        make = super().buffer
        return self.round(lambda: make(numel, dtype, device))

    def split(self, color: int, key: int = 0) -> Communicator:
        raise ValueError("an elastic communicator cannot be split: the ranks of a part could not agree without the others")


def _restore(x: torch.Tensor, mine: torch.Tensor) -> None:
    with torch.no_grad():
        x.copy_(mine)
