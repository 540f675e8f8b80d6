"""GossipGraD's asynchronous distributed shuffle: samples just read are sent to another rank while the next ones are trained.

    shuffle = phalanx.data.AsyncShuffle((x, y), comm, batch=128)
    for epoch in range(90):
        for x, y in shuffle:                    # one local epoch; the epoch advances by itself
            train(x, y)

A rank keeps only its share in memory and never waits for a file, yet over the epochs every rank sees all data. `exchange.py`
decides what goes where, `share.py` holds the samples, and this file sends them. Published by Daily et al., GossipGraD (2018),
as a ring without a local shuffle; docs/shuffle.md lists the differences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.data.exchange import ExchangePlan, Indices, Kind, Last
from phalanx.data.position import Position
from phalanx.data.share import SampleMessage, Share, check_source
from phalanx.data.step import Step

if TYPE_CHECKING:
    from phalanx.data.draws import Draws

IN_FLIGHT = 2  # the most exchanges in flight: each has two steps of time, so a late one does not stop training at once

Batch = tuple[torch.Tensor, torch.Tensor]
Transform = Callable[[torch.Tensor, "Draws"], torch.Tensor]


class AsyncShuffle:
    """GossipGraD's distributed shuffle: batches of the samples that this rank holds, which change from epoch to epoch.

    After each batch, its samples are sent to another rank while you train on the next one. Each rank holds only its share in
    memory, and sees all data over the epochs. All ranks must iterate in the same way.

    Args:
        data: The whole data set, the same on all ranks: `phalanx.data.Arrays`, a pair of tensors, or anything with `len()` and
            `take(indices) -> (x, y)`. Each rank reads its share before the first batch and then drops `data`.
        comm: The communicator.
        batch: Samples per batch of one rank.
        plan: Where samples are sent. `"ring"` is the paper's.
        seed: Seeds the shares, the orders and the transform.
        transform: Called as `transform(x, draws)`. The random numbers belong to the sample, not to the rank that holds it.
        local_shuffle: Visit the samples of a rank in a new order in each epoch.
        last: What to do with samples that do not fill a batch. The default is `"drop"` with a local shuffle and `"keep"` without.

    Raises:
        ValueError: If an option is invalid, or the ranks disagree.

    Example:
        >>> x, y = torch.arange(8.0).view(8, 1), torch.arange(8)
        >>> def labels(comm):
        ...     return sorted(int(i) for _, y_ in phalanx.data.AsyncShuffle((x, y), comm, batch=2) for i in y_)
        >>> sorted(sum(phalanx.run_local(2, labels), []))
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        data: Any,
        comm: Communicator,
        *,
        batch: int,
        plan: Kind = "ring",
        seed: int = 0,
        transform: Transform | None = None,
        local_shuffle: bool = True,
        last: Last | None = None,
    ) -> None:
        last = last or ("drop" if local_shuffle else "keep")
        self.plan = ExchangePlan(check_source(data), comm.size, batch, plan, seed, local_shuffle, last)
        self._data, self._comm, self._transform = data, comm, transform
        self._epoch = self._step = 0
        self._share: Share | None = None
        self._order: Indices | None = None  # of the current epoch, None before its first step
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # to send from and to receive into, used in turn
        # by turn and rows: the messages at the beginning of a pair of buffers
        self._messages: dict[tuple[int, int], tuple[SampleMessage, SampleMessage]] = {}
        self._exchanges: deque[tuple[Pending, SampleMessage]] = deque()

    def __len__(self) -> int:
        """The number of batches of an epoch, the same on all ranks."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the current epoch."""
        for _ in range(self._step, self.plan.steps):
            yield self._next()

    def steps(self) -> Iterator[Step]:
        """Yield the rest of the current epoch as `Step`s of one micro-batch."""
        for index in range(self._step, self.plan.steps):
            epoch = self._epoch
            x, y = self._next()
            yield Step(epoch=epoch, index=index, batch=self.plan.trained(index), micro=((x, y),), samples=len(x))

    def _next(self) -> Batch:
        """Return the next batch, and start sending its chunk while the batch is trained."""
        share = self._share or self._read_share()
        if self._order is None:
            self._order = self._begin_epoch(share)
        epoch, step = self._epoch, self._step
        chunk = self.plan.chunk(self._order, step)
        ids = chunk[: self.plan.batch]
        x, y = share.read(ids)
        if self._comm.size > 1:
            self._send(share, chunk)
        self._step += 1
        if self._step == self.plan.steps:
            self._epoch, self._step, self._order = epoch + 1, 0, None
        if self._transform is not None:
            from phalanx.data.draws import Draws

            x = self._transform(x, Draws(self.plan.seed, epoch, ids))
        return x, y

    # ---- the exchange --------------------------------------------------------------------------------------------------------

    def _send(self, share: Share, chunk: Indices) -> None:
        """Exchange the chunk for as many samples of another rank, which replace it when they arrive."""
        while self._exchanges and (len(self._exchanges) == IN_FLIGHT or self._exchanges[0][0].done()):
            self._land(share)
        number, rank = self._epoch * self.plan.steps + self._step, self._comm.rank
        destinations = self.plan.destinations(self._epoch, self._step)
        dest, source = int(destinations[rank]), int((destinations == rank).argmax())
        key = turn, rows = number % IN_FLIGHT, self.plan.rows(self._step)
        if key not in self._messages:
            to_send, to_fill = self._buffers[turn]
            self._messages[key] = share.layout.message(to_send, rows), share.layout.message(to_fill, rows)
        outgoing, incoming = self._messages[key]
        share.take_out(chunk, outgoing)
        # the number is the tag: ranks in different steps wait for each other instead of mixing up samples
        pending = self._comm.exchange_async(outgoing.flat, dest, incoming.flat, source, tag=number)
        self._exchanges.append((pending, incoming))

    def _land(self, share: Share) -> None:
        """Wait for the oldest exchange and put what it brought into the share."""
        pending, incoming = self._exchanges[0]
        pending.wait()
        self._exchanges.popleft()
        share.put(incoming)

    def _land_all(self) -> None:
        while self._exchanges and self._share is not None:
            self._land(self._share)

    # ---- beginnings ------------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, share: Share) -> Indices:
        """The order of the current epoch, over the samples that have arrived."""
        self._land_all()
        share.index()
        if self._step:  # resumed mid-epoch: some of what this rank held at its beginning is elsewhere
            return self.plan.order(self._epoch, self._comm.rank, self.plan.shares(self._epoch)[self._comm.rank])
        return self.plan.order(self._epoch, self._comm.rank, share.ids())

    def _read_share(self) -> Share:
        """Read what this rank owns at the current position, and check that all ranks are at the same position."""
        held = self.plan.held(self._epoch, self._step, self._comm.rank)
        share = Share(self._data, held, self.plan.capacity)
        kind = {name: str(value) for name, value in asdict(share.layout).items()}
        _agree(self._comm, {**asdict(self.plan), "epoch": self._epoch, "step": self._step, **kind})
        if self._comm.size > 1:
            nbytes = share.layout.nbytes(max(self.plan.rows(step) for step in range(self.plan.steps)))
            self._buffers = [
                (torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)) for _ in range(IN_FLIGHT)
            ]
        self._share, self._data = share, None
        return share

    # ---- the position ----------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The position after the last batch you got. It counts the samples of this epoch on all ranks together."""
        trained = sum(self.plan.trained(step) for step in range(self._step))
        return Position(self.plan.seed, self._epoch, trained)

    def held(self) -> Indices:
        """The numbers of the samples that this rank owns now, ascending. Waits for samples in transit."""
        if self._share is None:
            return self.plan.held(self._epoch, self._step, self._comm.rank)
        self._land_all()
        return self._share.ids()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data, the same on all ranks. It holds no samples, because it determines which rank owns them."""
        return {**asdict(self.plan), "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position before the first batch. The share of that position is then read from `data`.

        The saved seed replaces the current one. Between epochs, the number of ranks and the batch may have changed. In
        mid-epoch they must be the same, because they decide which rank owns what.
        """
        if missing := [name for name in self.state_dict() if name not in state]:
            raise ValueError(f"this is not the state of an AsyncShuffle: it has no {', '.join(missing)}")
        if self._share is not None:
            raise RuntimeError("AsyncShuffle: load the state before the first batch; make a new AsyncShuffle and load it there")
        free = {"seed", "ranks", "batch"} if state["step"] == 0 else {"seed"}
        for name, mine in asdict(self.plan).items():
            if name not in free and state[name] != mine:
                where = "at the end of an epoch" if name in ("ranks", "batch") else "with the same data and options"
                raise ValueError(
                    f"AsyncShuffle: the state has {name}={state[name]!r}, step {state['step']} of epoch {state['epoch']}, but "
                    f"this one has {name}={mine!r}: resume {where}"
                )
        self.plan = replace(self.plan, seed=state["seed"])
        self._epoch, self._step = state["epoch"], state["step"]

    def close(self) -> None:
        """Wait for samples in transit, so that no neighbour misses them. You may iterate again later. Idempotent."""
        self._land_all()

    def __enter__(self) -> AsyncShuffle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if kind is None:  # after an exception, neighbours may never arrive
            self.close()


def _agree(comm: Communicator, mine: Mapping[str, Any]) -> None:
    """Raise on all ranks if they differ in any entry of `mine`."""
    gathered = comm.allgather_obj(dict(mine))
    for name in mine:
        values = [facts[name] for facts in gathered]
        if any(value != values[0] for value in values):
            raise ValueError(f"AsyncShuffle: ranks disagree on {name}: {values}, by rank")
