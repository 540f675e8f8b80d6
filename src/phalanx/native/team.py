"""The ranks of one host that share memory, and their collectives.

A `HostTeam` holds the ranks of a communicator that share a host. Tensors in memory that the team allocated are reduced in place,
by any rank that has time. Other tensors pass through a staging area. All ranks make the same calls in the same order, from one
thread at a time. Only `abort()` may be called from another thread.

    team = HostTeam.join(store, rank, size, timeout=60, name="world/host0")     # None on all ranks if it cannot work
    flat = team.allocate(nbytes).view(torch.float32)
    team.all_reduce(flat, scale=1 / size)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from phalanx.native.core import BEGUN, OPS, TYPES
from phalanx.native.errors import call_text
from phalanx.native.failures import Failures
from phalanx.native.meeting import Store, meet

log = logging.getLogger("phalanx")

Reduction = Literal["sum", "mean", "max", "min"]
Topic = tuple[int, int, Callable[[], object]]  # the arguments of `set_topic`
Codes = tuple[int, int, float]  # the core's numbers for a dtype and a reduction, and the factor of the result


class HostTeam:
    """The ranks of one host that share memory. Created by `join`."""

    def __init__(self, team: Any, rank: int, size: int, timeout: float, pids: Sequence[int]) -> None:
        self.rank, self.size, self._team = rank, size, team
        self._failures = Failures(team, rank, size, timeout, pids)
        self._arenas: dict[int, int] = {}  # address of this rank's part -> id

    @staticmethod
    def join(store: Store, rank: int, size: int, *, timeout: float, name: str) -> HostTeam | None:
        """Meet the other ranks. Returns None on all ranks if they cannot share memory; rank 0 logs the reason."""
        met = meet(store, rank, size, timeout, f"shm/{name}")
        if met.team is None:
            if rank == 0 and not met.switched_off:  # no warning if it was switched off on purpose
                log.warning("phalanx: %s: ranks of one host talk through torch.distributed, because %s", name, met.reason)
            return None
        return HostTeam(met.team, rank, size, timeout, met.pids)

    def set_topic(self, digest: int, number: int, text: Callable[[], object]) -> None:
        """Set the topic of the calls that follow. Ranks whose topics differ fail with a Disagreement that quotes `text`."""
        self._failures.topic = text
        self._team.set_topic(digest, number)

    def set_long_pieces(self) -> None:
        """On all ranks: tensors outside the arenas pass in long pieces, with far fewer meetings and more cache misses."""
        self._team.set_long_pieces()

    # ---- memory --------------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Collective: `nbytes` of zeros on each rank, uint8 and page-aligned. Collectives on views of it copy nothing."""
        return self._allocate(nbytes, one_for_all=False)

    def allocate_one_for_all(self, nbytes: int) -> torch.Tensor:
        """Collective: allocate `nbytes` that all ranks see and may write, for one replica of parameters per host."""
        return self._allocate(nbytes, one_for_all=True)

    def _allocate(self, nbytes: int, *, one_for_all: bool) -> torch.Tensor:
        status, arena = self._team.allocate(nbytes, int(one_for_all))
        if status:
            raise self._failures.error(status, f"allocate({nbytes})")
        x = torch.frombuffer(arena, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        self._arenas[x.data_ptr()] = arena.id
        return x

    def release(self, x: torch.Tensor) -> None:
        """Collective: drop what `allocate` returned. The memory is freed when no tensor on any rank uses it."""
        status = self._team.release(self._arenas.pop(x.data_ptr()))
        if status:
            raise self._failures.error(status, "release()")

    def owns(self, x: torch.Tensor) -> bool:
        """Whether a contiguous tensor lies in this rank's part of an arena."""
        return x.is_cpu and self._team.owns(x.data_ptr(), x.nbytes)

    # ---- collectives, in place on contiguous CPU tensors -----------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum", *, scale: float = 1.0) -> torch.Tensor:
        """Reduce `x` over the ranks in rank order and multiply by `scale`: same bits on all. Half floats are rounded once."""
        kind, number, scale = self._reduction(x, op, scale)
        status = self._team.all_reduce(x.data_ptr(), x.numel(), kind, number, scale)
        if status:
            raise self._failures.error(status, call_text("all_reduce", x, op))
        return x

    def all_reduce_about(
        self, x: torch.Tensor, op: Reduction, topic: Topic, codes: Codes | None = None, seconds: float | None = None
    ) -> bool:
        """`set_topic` and `all_reduce` in one call, because two calls from Python take almost as long as a sum of a few KiB.

        `codes(x.dtype, op)` from an earlier call skip the checks that `x` is contiguous and on the CPU. With `seconds`, wait only
        so long for the others; return whether it finished. If not, the next call, in any thread, is the same without `seconds`.
        """
        digest, number, self._failures.topic = topic
        kind, operator, scale = codes or self._reduction(x, op, 1.0)
        at, count = x.data_ptr(), x.numel()
        if seconds is None:
            status = self._team.all_reduce(at, count, kind, operator, scale, digest, number)
        else:
            status = self._team.all_reduce_or_begin(at, count, kind, operator, scale, digest, number, int(seconds * 1e9))
        if status and status != BEGUN:
            raise self._failures.error(status, call_text("all_reduce", x, op))
        return bool(status != BEGUN)

    def reduce_scatter(self, x: torch.Tensor, op: Reduction = "sum", *, scale: float = 1.0) -> torch.Tensor:
        """Reduce this rank's part of `x` in place and return it, flat. The other parts are left alone."""
        kind, number, scale = self._reduction(x, op, scale)
        status = self._team.reduce_scatter(x.data_ptr(), x.numel(), kind, number, scale)
        if status:
            raise self._failures.error(status, call_text("reduce_scatter", x, op))
        return self.part(x, self.rank)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Fill part r of `x` from rank r."""
        status = self._team.all_gather(_address(x), x.numel(), TYPES[x.dtype])
        if status:
            raise self._failures.error(status, call_text("all_gather", x))
        return x

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Fill `x` from rank `root`."""
        status = self._team.broadcast(_address(x), x.numel(), TYPES[x.dtype], root)
        if status:
            raise self._failures.error(status, call_text("broadcast", x))
        return x

    def tell(self, text: str) -> list[str]:
        """Exchange texts with all ranks, at most `failures.TOPIC` bytes each."""
        return self._failures.tell(text)

    def call(self, name: str, work: Callable[[Any], int]) -> None:
        """Make a call of the core that has no method here. `work` gets the core's team and returns a status."""
        status = work(self._team)
        if status:
            raise self._failures.error(status, name)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        status = self._team.barrier()
        if status:
            raise self._failures.error(status, "barrier()")

    def part(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of flat `x` that belongs to `rank`, cut as a schedule cuts it, without padding."""
        n = x.numel()
        return x.view(-1)[rank * n // self.size : (rank + 1) * n // self.size]

    def _reduction(self, x: torch.Tensor, op: str, scale: float) -> Codes:
        if not (x.is_contiguous() and x.is_cpu):
            raise ValueError(f"shared memory wants contiguous CPU tensors, got strides {x.stride()} on {x.device}")
        return self.codes(x.dtype, op, scale)

    def codes(self, dtype: torch.dtype, op: str, scale: float = 1.0) -> Codes:
        """For `all_reduce_about`."""
        if op == "mean":
            return TYPES[dtype], 0, scale / self.size
        summed = "max" if dtype is torch.bool else "sum"  # the sum of booleans is their `or`
        return TYPES[dtype], OPS[summed if op == "sum" else op], scale

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Make this rank's current and later calls fail within 50 ms; the other ranks are notified. Thread-safe."""
        self._team.abort()

    def close(self) -> None:
        """Leave the team. Later calls raise; tensors stay valid. Idempotent."""
        self._team.leave()


def _address(x: torch.Tensor) -> int:
    if not (x.is_contiguous() and x.is_cpu):
        raise ValueError(f"shared memory wants contiguous CPU tensors, got strides {x.stride()} on {x.device}")
    return x.data_ptr()
