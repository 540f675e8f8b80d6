"""The loader: micro-batches of this rank, epoch after epoch, made ahead of time. It knows its position and resumes anywhere.

    loader = Loader(phalanx.data.open("cifar10:DIR"), comm, batch=512, transform=Chain(PadCrop(4), Flip(), Normalise(MEAN, STD)))
    for epoch in range(90):
        for x, y in loader:            # one epoch; the next `for` is the next epoch, in another order
            ...

position.py and batch.py decide what comes when, assemble.py what a micro-batch is, and workers.py who makes it. prefetch.py is
the queue between them. It continues across the end of an epoch, so the first step of the next one finds its samples ready.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from phalanx.data.assemble import Decode, Made, Maker, OnBad
from phalanx.data.batch import BatchPlan, Stage
from phalanx.data.followed_world import FollowedWorld
from phalanx.data.loader_options import checked_kind, checked_pin, checked_source, one_of
from phalanx.data.position import Last, Position, whole_number
from phalanx.data.prefetch import Prefetch
from phalanx.data.route import BatchPolicy, MicroBatch, Route
from phalanx.data.scatter import Ranked, length_of
from phalanx.data.step import Step
from phalanx.data.transforms import Transform
from phalanx.data.workers import CallerThread, Kind, LocalWork, Pool, RemoteWork, Workers, default_workers
from phalanx.schedule.printable import one_line

REMEMBERED = 1000  # names of samples that were left out; their number is always exact


@dataclass(frozen=True, slots=True)
class Alone:
    """A world of one."""

    rank: int = 0
    size: int = 1


class Loader:
    """This rank's share of every batch, made ahead of time.

    One `for` loop is one epoch. The next loop is the next epoch, in another order. The loader knows its position and resumes
    anywhere, on any number of ranks.

    Args:
        source: A source of `phalanx.data.open`, a tuple of tensors, or any map-style data set; the same on all ranks.
        comm: A communicator, anything with `rank` and `size`, or None for one process.
        batch: The samples of one update over all ranks, or a `BatchPlan`.
        shuffle: Visit the samples in a new order in each epoch, the same on all ranks.
        seed: Seeds the orders and the random numbers of the transforms.
        last: What happens to samples that fill no whole batch: `"drop"` them, `"pad"` the batch from the beginning of the epoch,
            or `"keep"` them as a smaller batch. By default `"drop"` with shuffle and `"keep"` without.
        decode: Turns the bytes of an encoded image into pixels, such as `RandomResizedCrop(224)`.
        transform: Called as `transform(batch, draws)` on a whole micro-batch, such as `Normalise(MEAN, STD)`.
        micro_batch: The most samples of one backward pass. A step then has several micro-batches.
        workers: Threads or processes that make batches ahead. 0 makes them in your thread; None chooses.
        kind: `"thread"` or `"process"`.
        prefetch: Micro-batches in progress per worker.
        pin_memory: Pin the batches. None pins them where there is an accelerator.
        on_bad: `"error"` raises on a damaged sample; `"skip"` leaves it out and warns once per epoch.
        on_change: When ranks of an elastic communicator leave or join: `"keep_batch"` shares the same batch among those who are
            there; `"keep_share"` keeps each rank's share, so that the batch, and the learning rate with it, shrinks and grows.

    Raises:
        ValueError: If an option makes no sense, or the batch does not divide over the ranks.
        TypeError: If `source` is not a data set.

    Example:
        >>> x, y = torch.arange(12.0).view(12, 1), torch.arange(12)
        >>> with phalanx.data.Loader((x, y), comm, batch=4) as loader:
        ...     [labels.tolist() for images, labels in loader][0], len(loader), loader.position.epoch
        ([2, 4, 1, 6], 3, 1)
    """

    def __init__(
        self,
        source: Any,
        comm: Ranked | None = None,
        *,
        batch: int | BatchPlan,
        shuffle: bool = True,
        seed: int = 0,
        last: Last | None = None,
        decode: Decode | None = None,
        transform: Transform | None = None,
        micro_batch: int | None = None,
        workers: int | None = None,
        kind: Kind = "thread",
        prefetch: int = 2,
        pin_memory: bool | None = None,
        on_bad: OnBad = "error",
        on_change: BatchPolicy = "keep_batch",
    ) -> None:
        one_of("on_change", on_change, BatchPolicy)
        comm = comm if comm is not None else Alone()
        plan = batch if isinstance(batch, BatchPlan) else BatchPlan([Stage(epochs=1, batch=whole_number("batch", batch, 1))])
        last = last if last is not None else "drop" if shuffle else "keep"
        self._maker = Maker(checked_source(source, decode, comm), shuffle, decode, transform, one_of("on_bad", on_bad, OnBad))
        self._world = FollowedWorld(comm, self, on_change) if getattr(comm, "elastic", False) else None
        follows = self._world.settings if self._world is not None else None
        self._route = Route(length_of(self._maker.source), plan, last, comm.size, comm.rank, micro_batch, follows)
        self._kind = checked_kind(kind, self._maker)
        self._workers = default_workers(self._maker, comm, kind) if workers is None else whole_number("workers", workers)
        self._depth = max(1, self._workers * whole_number("prefetch", prefetch, 1))
        self._pin = checked_pin(pin_memory)
        self._position = Position(whole_number("seed", seed))
        self._pool: Pool | None = None  # started by the first iteration
        self._queue: Prefetch | None = None
        self._turn = 0  # which iteration is the present one
        self._under_way: int | None = None  # the epoch that is iterated over; at its last step the position is in the next one
        self._closed = False
        self._skipped: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
        self._skipped_count = 0
        self._warned_in: int | None = None  # an epoch

    @property
    def plan(self) -> BatchPlan:
        """The batch plan. It has one stage if you gave a number."""
        return self._route.plan

    @property
    def workers(self) -> int:
        """The number of threads or processes that make micro-batches ahead. 0 means your own thread."""
        return self._workers

    # -- iterating

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches from the position to the end of its epoch."""
        for _, made in self._to_the_end_of_the_epoch():
            yield made.data

    def steps(self) -> Iterator[Step]:
        """The rest of the epoch as steps, each with all its micro-batches."""
        parts: list[Made] = []
        for wanted, made in self._to_the_end_of_the_epoch():
            parts.append(made)
            if wanted.ends_step:
                micro, samples = tuple(part.data for part in parts), sum(part.samples for part in parts)
                parts = []
                yield Step(wanted.epoch, wanted.index, len(wanted.step), micro, samples)

    def __len__(self) -> int:
        """The number of micro-batches of the whole epoch, also when you resumed in the middle of it."""
        epoch = self._position.epoch if self._under_way is None else self._under_way
        return self._route.micro_count(Position(self._position.seed, epoch))

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of steps of `epoch`."""
        return len(self._route.steps(Position(0, epoch)))

    # -- where it stands

    @property
    def position(self) -> Position:
        """The place after the last complete step you got. Prefetched batches do not count."""
        return self._position

    def seek(self, position: Position) -> None:
        """Continue from `position`, which may come from a run with another number of ranks or another batch."""
        self._position = self._route.reach(position)
        self._turn += 1
        self._under_way = None

    def rewind(self) -> None:
        """Go back to the beginning of the current epoch, for example before each evaluation."""
        self.seek(Position(self._position.seed, self._position.epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data, with the settings that the order depends on."""
        at = self._position
        state: dict[str, Any] = {
            "seed": at.seed,
            "epoch": at.epoch,
            "samples": at.samples,
            "n": self._route.n,
            "shuffle": self._maker.shuffle,
        }
        if at.owed:
            state["owed"] = list(at.owed)
        return state | (self._world.state() if self._world is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, on any number of ranks. The seed of the state replaces the loader's."""
        mine = self.state_dict()
        if missing := [name for name in ("seed", "epoch", "samples", "n", "shuffle") if name not in state]:
            raise ValueError(f"this is not the state of a Loader: it has no {', '.join(missing)}")
        for name in ("n", "shuffle"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"the state has {name}={state[name]!r}, this loader has {name}={mine[name]!r}: their orders differ"
                )
        if self._world is not None:
            self._world.load(state)
        owed = tuple((int(first), int(last)) for first, last in state.get("owed", ()))
        self.seek(Position(state["seed"], state["epoch"], state["samples"], owed))

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the last damaged samples that this rank left out. `skipped_count` counts all."""
        return tuple(self._skipped)

    @property
    def skipped_count(self) -> int:
        """The number of damaged samples that this rank left out, in all epochs."""
        return self._skipped_count

    # -- the end

    def close(self) -> None:
        """Stop the workers and wait for them. Batches you already have stay valid."""
        self._closed = True
        self._turn += 1
        self._forget_queue()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- how it works

    def _to_the_end_of_the_epoch(self) -> Iterator[tuple[MicroBatch, Made]]:
        if self._world is not None:
            self._follow(self._world)
        queue = self._queue_from(self._position)
        self._turn += 1
        turn, epoch = self._turn, self._position.epoch
        self._under_way = epoch
        try:
            while self._position.epoch == epoch:
                try:
                    wanted, made = queue.get()
                except BaseException:
                    self._forget_queue()  # a new iteration begins again at the last completed step
                    raise
                self._note(wanted, made)
                yield wanted, made
                if self._turn != turn:
                    raise RuntimeError("this iteration is over: the loader was closed, moved, or is iterated over elsewhere")
                if self._world is not None and wanted.ends_step and self._world.leads:
                    self._follow(self._world, epoch)
                    queue = self._queue_from(self._position)
        finally:
            if self._turn == turn:
                self._under_way = None

    def _follow(self, world: FollowedWorld, epoch: int | None = None) -> None:
        """Between two steps of an elastic job: samples of the dead come again, newcomers come in, all share what is left."""
        self._position = self._route.reach(world.settle(self._position, self._route.n))
        if epoch is None or self._position.epoch == epoch:  # at the end of an epoch the others may evaluate first
            world.let_in()
        route = world.reroute(self._route)
        if route is not self._route:
            self._route = route
            self._forget_queue()

    @property
    def world(self) -> FollowedWorld | None:
        """How this loader follows an elastic communicator; None for any other."""
        return self._world

    def _queue_from(self, position: Position) -> Prefetch:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if self._pool is None:
            self._pool = self._start()
        if self._queue is None or self._queue.at != position:
            self._forget_queue()
            self._queue = Prefetch(self._route.walk(position), self._pool, self._depth, position)
        return self._queue

    def _forget_queue(self) -> None:
        if self._queue is not None:
            self._queue.cancel()
            self._queue = None

    def _start(self) -> Pool:
        if self._workers == 0:
            return CallerThread(replace(self._maker, seeds=True), self._pin)
        if self._kind == "process":
            return Workers(RemoteWork(replace(self._maker, seeds=True), pin=self._pin), self._workers)
        # data in memory: one indexing operation per batch, for which more threads would only queue
        count = 1 if self._maker.takes_at_once else self._workers
        return Workers(LocalWork(self._maker, pin=self._pin), count)

    def _note(self, wanted: MicroBatch, made: Made) -> None:
        if wanted.ends_step:
            self._position = wanted.after
            if self._world is not None:
                self._world.took(wanted, self._route)
        self._skipped.extend(made.skipped)
        self._skipped_count += len(made.skipped)
        if made.skipped and self._warned_in != wanted.epoch:
            self._warned_in = wanted.epoch
            name, reason = made.skipped[0]
            message = one_line(f"epoch {wanted.epoch}: left out {name}: {reason} (`skipped` will have more)")
            warnings.warn(message, stacklevel=4)
