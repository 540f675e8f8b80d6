"""Build a loader's supply from its checked options: what makes the micro-batches, and how workers start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any

from phalanx.data.assemble import Maker
from phalanx.data.batch import BatchPlan
from phalanx.data.followed_world import FollowedWorld
from phalanx.data.generators import seed_of_worker
from phalanx.data.position import Last
from phalanx.data.route import Route
from phalanx.data.scatter import length_of
from phalanx.data.stream import StreamMaker, StreamShare
from phalanx.data.stream_queue import Streamed, StreamPlan
from phalanx.data.supply import Numbered, Supply
from phalanx.data.worker_process import Assignment, Task, WorkerProcess
from phalanx.data.workers import CallerThread, LocalWork, Pool, RemoteWork, Workers


@dataclass(frozen=True)
class Build:
    """A loader's options, checked. `context` starts processes; without it workers are threads."""

    dataset: Any  # as the user passed it
    maker: Maker
    comm: Any
    plan: BatchPlan
    last: Last
    micro_batch: int | None
    seed: int
    workers: int
    context: BaseContext | None
    depth: int  # micro-batches in progress, over all workers
    pin: bool
    worker_init_fn: Callable[[int], object] | None
    world: FollowedWorld | None = None  # of an elastic communicator

    def numbered(self) -> Supply:
        """The supply of samples with numbers."""
        comm, follows = self.comm, self.world.settings if self.world is not None else None
        route = Route(length_of(self.maker.source), self.plan, self.last, comm.size, comm.rank, self.micro_batch, follows)
        made = Numbered(route, self.maker.shuffle, self.depth, self._one_pool)
        if self.world is not None:
            self.world.supply = made
        return made

    def streamed(self, sharded: bool) -> Supply:
        """The supply of a stream."""
        if self.world is not None:
            raise ValueError("a stream has no numbered samples, which an elastic communicator shares out anew when ranks leave")
        for stage in self.plan.stages:  # check now, not when its first epoch begins
            stage.split(self.comm.size, self.micro_batch)
        plan = StreamPlan(self.plan, self.last, sharded, self.micro_batch, length_if_any(self.dataset))
        depth = max(1, self.depth // max(1, self.workers))
        return Streamed(plan, self.comm, self.workers, depth, lambda: self._pools_of_streams(sharded))

    def _one_pool(self) -> Pool:
        if self.workers == 0:
            return CallerThread(self._seeding, self.pin)
        if self.context is not None:
            task = self._seeding
            return Workers(RemoteWork(lambda worker: self._process(task, worker), self.workers, pin=self.pin), self.workers)
        # data in memory need one indexing operation per batch; more threads would only queue
        count = 1 if self.maker.takes_at_once else self.workers
        return Workers(LocalWork(self.maker, pin=self.pin), count)

    def _pools_of_streams(self, sharded: bool) -> Sequence[Pool]:
        workers = max(1, self.workers)
        shares = [StreamShare(self.comm.rank, self.comm.size, worker, workers) for worker in range(workers)]
        maker = self.maker if self.workers and self.context is None else self._seeding
        tasks = [StreamMaker(maker, self.plan, self.last, share, sharded, self.micro_batch) for share in shares]
        if self.workers == 0:
            return [CallerThread(tasks[0], self.pin)]
        if self.context is None:
            return [Workers(LocalWork(task, pin=self.pin), 1) for task in tasks]
        # all processes start before the first thread does
        remote = [RemoteWork(self._starter(task), 1, pin=self.pin) for task in tasks]
        return [Workers(work, 1) for work in remote]

    def _starter(self, task: StreamMaker) -> Callable[[int], WorkerProcess]:
        return lambda _: self._process(task, task.share.worker)

    def _process(self, task: Task, worker: int) -> WorkerProcess:
        assert self.context is not None
        seed = seed_of_worker(self.seed, self.comm.rank, worker)
        return WorkerProcess(Assignment(task, self.dataset, worker, self.workers, seed, self.worker_init_fn), self.context)

    @property
    def _seeding(self) -> Maker:
        return replace(self.maker, seeds=True)


def length_if_any(dataset: Any) -> int | None:
    """`len(dataset)`, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
