"""The loader: micro-batches of this rank, epoch after epoch, made ahead of time. It knows its position and resumes anywhere.

    loader = Loader(phalanx.data.open("cifar10:DIR"), comm, batch=512, transform=Chain(PadCrop(4), Flip(), Normalise(MEAN, STD)))
    for epoch in range(90):
        for x, y in loader:            # one epoch; the next `for` is the next epoch, in another order
            ...

position.py and batch.py decide which samples come when, assemble.py makes a micro-batch, and workers.py runs it ahead.
prefetch.py is the queue between them. It continues across the end of an epoch, so the first step of the next one finds its
samples ready. stream.py handles data that can only be iterated over. build.py puts it all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, NoReturn

from phalanx.data import loader_options as check
from phalanx.data.assemble import Decode, Made, OnBad
from phalanx.data.batch import BatchPlan
from phalanx.data.build import Build
from phalanx.data.collate import Collate
from phalanx.data.followed_world import FollowedWorld
from phalanx.data.left_out import LeftOut
from phalanx.data.position import Last, Position, check_last, whole_number
from phalanx.data.route import BatchPolicy, MicroBatch
from phalanx.data.saved_position import from_state, to_state
from phalanx.data.scatter import Ranked
from phalanx.data.step import Step
from phalanx.data.supply import Queue
from phalanx.data.transforms import Transform
from phalanx.data.workers import Kind, default_workers


class Loader:
    """This rank's share of every batch, made ahead of time.

    One `for` loop is one epoch. The next loop is the next epoch, in another order. The loader knows its position and resumes
    anywhere, on any number of ranks.

    Args:
        source: A source of `phalanx.data.open`, a tuple of tensors, any map-style data set, or an `IterableDataset`; the same on
            all ranks.
        comm: A communicator, anything with `rank` and `size`, or None for one process.
        batch: The samples of one update over all ranks, or a `BatchPlan`.
        shuffle: Visit the samples in a new order in each epoch, the same on all ranks. None shuffles everything but a stream.
        seed: Seeds the orders and the random numbers of the transforms.
        last: What to do with samples that do not fill a batch: `"drop"` them, `"pad"` the batch from the beginning of the epoch,
            or `"keep"` them as a smaller batch. The default is `"drop"` with shuffle and `"keep"` without.
        decode: Turns the bytes of an encoded image into pixels, such as `RandomResizedCrop(224)`.
        transform: Called as `transform(batch, draws)` on a whole micro-batch, such as `Normalise(MEAN, STD)`.
        micro_batch: The maximum number of samples per backward pass. A larger step has several micro-batches.
        workers: Threads or processes that make batches ahead. 0 makes them in your thread; None chooses.
        kind: `"thread"` or `"process"`.
        prefetch: Micro-batches in progress per worker.
        pin_memory: Pin the batches. None pins them if there is an accelerator.
        on_bad: `"error"` raises on a damaged sample; `"skip"` leaves it out and warns once per epoch.
        collate_fn: Makes a micro-batch of a list of samples, in the worker. By default they are stacked as in torch.
        worker_init_fn: Called in each worker process with its number, before the first sample.
        multiprocessing_context: How processes start: `"fork"`, `"forkserver"`, `"spawn"` or a multiprocessing context. None
            forks, so that your script needs no `if __name__ == "__main__":`.
        sharded: The `IterableDataset` shards itself, by `phalanx.data.stream_share()`. Otherwise the loader divides its items.
        on_change: When ranks of an elastic communicator leave or join, `"keep_batch"` divides the same batch over the remaining
            ranks; `"keep_share"` keeps each rank's share, so the batch and the learning rate shrink and grow.

    Raises:
        ValueError: If an option is invalid, or the batch does not divide over the ranks.
        TypeError: If `source` is not a data set, or an option is one of torch's `DataLoader`. The message names the equivalent.

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
        batch: int | BatchPlan | None = None,
        shuffle: bool | None = None,
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
        collate_fn: Collate | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        sharded: bool = False,
        on_change: BatchPolicy = "keep_batch",
        **_unknown: NoReturn,
    ) -> None:
        comm = check.checked_comm(comm)
        check.refuse(_unknown, comm.size)
        stream = check.is_stream(source)
        shuffles = (not stream) if shuffle is None else shuffle
        last = last if last is not None else "drop" if shuffles else "keep"
        check_last(last)
        maker = check.checked_maker(
            source, comm, shuffle=shuffles, decode=decode, transform=transform, on_bad=on_bad, collate_fn=collate_fn, kind=kind
        )
        self._workers = default_workers(maker, comm, kind, stream) if workers is None else whole_number("workers", workers)
        build = Build(
            dataset=source,
            maker=maker,
            comm=comm,
            plan=check.checked_plan(batch),
            last=last,
            micro_batch=micro_batch,
            seed=whole_number("seed", seed),
            workers=self._workers,
            context=check.checked_context(multiprocessing_context, kind, worker_init_fn),
            depth=max(1, self._workers * whole_number("prefetch", prefetch, 1)),
            pin=check.checked_pin(pin_memory),
            worker_init_fn=worker_init_fn,
            world=FollowedWorld.of(comm, self, on_change),
        )
        check.checked_kind_of_source(build, stream=stream, shuffle=shuffle, on_bad=on_bad, sharded=sharded)
        self._supply = build.streamed(sharded) if stream else build.numbered()
        self._dataset, self._plan, self._micro_batch, self._ranks = source, build.plan, micro_batch, comm.size
        self.world = build.world  # how this loader follows an elastic communicator; None for any other
        self._position = Position(build.seed)
        self._queue: Queue | None = None
        self._turn = 0  # number of the current iteration
        self._under_way: int | None = None  # the epoch being iterated; at its last step the position is already in the next one
        self._closed = False
        self._left_out = LeftOut()

    @property
    def dataset(self) -> Any:
        """The source, as you passed it."""
        return self._dataset

    @property
    def batch_size(self) -> int:
        """The samples of a micro-batch of this rank, as a `DataLoader` counts them. The last of an epoch may have fewer."""
        return self._plan.at(self._epoch).split(self._ranks, self._micro_batch).micro_batch

    @property
    def plan(self) -> BatchPlan:
        """The batch plan. It has one stage if you gave a number."""
        return self._plan

    @property
    def workers(self) -> int:
        """The number of threads or processes that make micro-batches ahead. 0 means your own thread."""
        return self._workers

    # -- iterating

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches from the position to the end of its epoch."""
        for _, made in self._rest_of_epoch():
            yield made.data

    def steps(self) -> Iterator[Step]:
        """Yield the rest of the epoch as steps, each with all its micro-batches."""
        parts: list[Made] = []
        for wanted, made in self._rest_of_epoch():
            parts.append(made)
            if wanted.ends_step:
                micro, samples = tuple(part.data for part in parts), sum(part.samples for part in parts)
                parts = []
                yield Step(wanted.epoch, wanted.index, len(wanted.step), micro, samples)

    def __len__(self) -> int:
        """The number of micro-batches of the whole epoch, also when you resumed in the middle of it.

        It is the same in all epochs, unless a `BatchPlan` changes the batch. A stream has a length if its data set has one.
        """
        return self._supply.micro_count(self._epoch)

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of steps of `epoch`."""
        return self._supply.step_count(epoch)

    # -- the position

    @property
    def position(self) -> Position:
        """The position after the last complete step that you got. Prefetched batches do not count."""
        return self._position

    def seek(self, position: Position) -> None:
        """Continue from `position`, which may come from a run with another number of ranks or another batch."""
        self._position = self._supply.reach(position)
        self._turn += 1
        self._under_way = None

    def rewind(self) -> None:
        """Go back to the beginning of the current epoch, for example before each evaluation."""
        self.seek(Position(self._position.seed, self._position.epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data, with the settings that the order depends on."""
        if self.world is None:
            return to_state(self._position, self._supply.identity())
        self._position = self.world.settle(self._position)  # a rank may have died in the last step
        return to_state(self._position, self._supply.identity()) | self.world.state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, on any number of ranks. The seed of the state replaces the loader's."""
        self.seek(from_state(state, self._supply.identity()))
        if self.world is not None:
            self.world.load(state)

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the last damaged samples that this rank left out. `skipped_count` counts all."""
        return self._left_out.last

    @property
    def skipped_count(self) -> int:
        """The number of damaged samples that this rank left out, in all epochs."""
        return self._left_out.count

    # -- the end

    def close(self) -> None:
        """Stop the workers and wait for them. Batches you already have stay valid."""
        self._closed = True
        self._turn += 1
        self._drop_queue()
        self._supply.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- how it works

    @property
    def _epoch(self) -> int:
        return self._position.epoch if self._under_way is None else self._under_way

    def _rest_of_epoch(self) -> Iterator[tuple[MicroBatch, Made]]:
        self._follow()
        queue = self._queue_from(self._position)
        self._turn += 1
        turn, begin, epoch = self._turn, self._position, self._position.epoch
        self._under_way = epoch
        try:
            while self._position.epoch == epoch:
                try:
                    found = queue.get() if self.world is None else self.world.timed(queue.get)
                except BaseException:
                    self._drop_queue()  # a new iteration restarts at the last completed step
                    raise
                if found is None:  # the stream ended: nothing is left of its epoch
                    resumed_there = self._position == begin
                    self._position = Position(self._position.seed, epoch + 1)
                    if resumed_there:
                        yield from self._rest_of_epoch()
                    return
                wanted, made = found
                if wanted.ends_step:
                    self._position = wanted.after
                    if self.world is not None:
                        self.world.took(wanted)
                self._left_out.note(epoch, made.skipped, stacklevel=3)
                yield wanted, made
                if self._turn != turn:
                    raise RuntimeError("this iteration is over: the loader was closed, moved, or is iterated over elsewhere")
                if self.world is not None and wanted.ends_step and self.world.leads:
                    self._follow(epoch)
                    queue = self._queue_from(self._position)
        finally:
            if self._turn == turn:
                self._under_way = None

    def _follow(self, epoch: int | None = None) -> None:
        if self.world is not None:  # between two steps of an elastic job; `epoch` is the current one
            self._position = self.world.follow(self._position)  # before new ranks join: they get this position
            if self.world.has_changed(let_in=epoch is None or self._position.epoch == epoch):
                self._drop_queue()

    def _queue_from(self, position: Position) -> Queue:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if self._queue is None or self._queue.at != position:
            self._drop_queue()
            self._queue = self._supply.queue(position)
        return self._queue

    def _drop_queue(self) -> None:
        if self._queue is not None:
            self._queue.cancel()
            self._queue = None
