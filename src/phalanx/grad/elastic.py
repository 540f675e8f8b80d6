"""The averager of an elastic job: an exchange counts for all survivors of a death, or they do it again among themselves.

Every rank keeps its own gradients until the exchange is committed (`kept.py`). So nothing is computed twice, and your loop only
sees that `backward()` returns a little later, with the mean over the ranks that are left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.failure import CommunicationError
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.averager import Averager
from phalanx.grad.following import Following
from phalanx.grad.kept import Kept
from phalanx.grad.measure import Overlap
from phalanx.grad.pace import SlowRank
from phalanx.grad.reducer import Group, GroupReducer
from phalanx.grad.slow_ranks import SlowRanks
from phalanx.grad.wire import SumOp
from phalanx.grad.wires import Wire


class KeepingReducer(GroupReducer):
    """Notes every gradient before it is sent."""

    def __init__(self, comm: Communicator, *, weighted: bool) -> None:
        super().__init__(comm, weighted=weighted)
        self.kept = Kept()

    def _load(self, group: Group, flags: Sequence[bool], *, along: int | None = None) -> tuple[torch.Tensor, SumOp]:
        self.kept.leaves(group.params, group.arena)
        return super()._load(group, flags, along=along)


class ElasticAverager(Averager):
    """As Averager, on ranks that may die and join."""

    _reducer_kind: type[GroupReducer] = KeepingReducer
    _delays = False  # whether it is double buffering

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        following: Following,
        sync: AllReduce,
        *,
        wire: Wire | None,
        bucket_bytes: int | None,
    ) -> None:
        self.comm, self.following = following.comm, following
        self._learned_in = -1  # the epoch whose ranks have agreed on the groups
        self._begun_with: float | None = None  # the sum of weights before this exchange
        super().__init__(params, names, self.comm, sync, wire=wire, bucket_bytes=bucket_bytes, delayed=self._delays)
        self._kept = self._reducer.kept if isinstance(self._reducer, KeepingReducer) else Kept()
        # set and not measured, because a newcomer has measured nothing
        self._overlap = Overlap(bool(sync.overlap) and not self._delays)
        self._slow = SlowRanks(self.comm, sync.on_slow)

    def _weigh(self) -> None:
        """If the number of ranks does not divide the batch, the gradients count by samples: the mean stays exact."""
        if not self._exchange.begun:  # noted before the first group leaves, on every rank, wherever it is when a rank dies
            self._begun_with = self._reducer.weights.usual
        loader = self.following.loader
        if loader is not None and not self._sync.weighted and not self._exchange.begun:
            world, weights = loader.world, self._reducer.weights
            weights.by_samples = world.uneven
            weights.mine = float(world.samples) if world.uneven else 1.0

    def _after(self, p: torch.nn.Parameter) -> None:
        if not self._busy:
            self._weigh()
        group = self._exchange.group_of(id(p))
        if group is not None and not self._paused:
            self._kept.came(p, group.arena)
        self._overlap.now = bool(self._overlap.told) and not self.comm.unsettled  # otherwise send all at the end, in a new world
        try:
            super()._after(p)
        except CommunicationError:  # the world broke just now
            if not self.comm.unsettled:
                raise
        if not self._paused:
            self._kept.settled(p)

    def _make_means(self, *, at_step: bool) -> None:
        begun = time.perf_counter()
        self._weigh()
        self._overlap.now = bool(self._overlap.told)
        warned = self._health.warned

        def exchange() -> None:
            if self._learned_in != self.comm.membership.epoch:
                self._start_again(warned, self._begun_with)
            super(ElasticAverager, self)._make_means(at_step=at_step)
            self._learned_in = self.comm.membership.epoch

        self.comm.round(exchange, counts=True)
        self._kept.clear()
        self._slow.exchanged(begun, self.steps + 1, self.following.loader)

    @property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        return tuple(self._slow.found)

    def _start_again(self, warned: list[str], usual: float | None) -> None:
        """Forget the groups of a world that has ended. Gradients that were sent are this rank's own again."""
        self._kept.restore()
        self._exchange.finish()
        self._exchange.start_with([])
        self._trained.agreed = False
        self._reducer.weights.forget(usual)
        self._health.warned = warned

    # ---- what a newcomer gets ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What ranks that take part in the next exchange have in common."""
        return {"steps": self.steps, "usual": self._reducer.weights.usual, "warned": self._health.warned}

    def load(self, state: dict[str, Any]) -> None:
        self.steps, self._health.warned = state["steps"], state["warned"]
        self._reducer.weights.forget(state["usual"])
