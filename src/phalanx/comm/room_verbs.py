"""Verbs of a communicator for the other rooms of Phalanx: buffers, exchanges between neighbours, a side channel.

`buffer`, `exchange_async`, `membership` and `shares_memory` are in the reference. The others are for Phalanx itself, and may
change without notice; `docs/generate/api.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import TypeVar

import torch

from phalanx.comm import messages
from phalanx.comm.compound import Compound, Turn
from phalanx.comm.connection import Connection
from phalanx.comm.elastic.membership import Membership
from phalanx.comm.hotline import Answer, Hotline
from phalanx.comm.memory import Memory
from phalanx.comm.pending import Pending
from phalanx.comm.run import LANES
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule

T = TypeVar("T")


class RoomVerbs:
    """What `Communicator` has beside the verbs of MPI."""

    _connection: Connection
    _memory: Memory
    _compound: Compound

    @property
    def schedule(self) -> Schedule:
        raise NotImplementedError

    elastic = False  # whether ranks may die and join: comm/elastic

    @property
    def membership(self) -> Membership:
        """Who is here: the number of the epoch, and the members in rank order. It changes with `elastic=True` alone."""
        return Membership(1, self._connection.members.ranks)

    @property
    def is_new(self) -> bool:
        """Whether this process came to an elastic job that was under way, and has not got its state yet."""
        return False

    def after_step(self) -> None:
        """An optimizer has made a step. For elastic communicators."""

    def as_one(self, work: Callable[[], T], *, counts: bool = False) -> T:
        """The result of `work`, whose verbs belong together: if a rank of an elastic job dies in it, all others repeat it.

        So `work` must not change what it reads. `counts`: what the ranks have trained since the last exchange is in the result.
        """
        return work()

    def has_left(self, member: int) -> bool:
        """Whether this member of an elastic job is known to be gone. Any thread may ask."""
        return False

    @property
    def patience(self) -> float:
        """Seconds without progress after which a wait is given up: the timeout, less the time to find out why."""
        return self._connection.issuer.breakdown.patience

    @property
    def multiple(self) -> int:
        """Buffers whose length is a multiple of this many elements need no padding."""
        return lcm(self.schedule.chunks, self._connection.members.size) * LANES  # the quantised one has a chunk per rank

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host and share memory."""
        return self._memory.is_shared_by_all

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make a flat tensor in the memory that this communicator reduces fastest. All ranks call it together.

        Args:
            numel: The number of elements, the same on all ranks.
            dtype: Their type.
            device: Where; only memory of the CPU can be shared.

        Returns:
            The tensor, not initialised.
        """
        return self._memory.buffer(numel, dtype, device)

    def shared_buffer(self, numel: int) -> torch.Tensor:
        """Flat float32 zeros that all ranks see and may write. All ranks call it together; needs `shares_memory`."""
        return self._memory.shared_buffer(numel)

    def on_host(self, name: str, work: Callable[[HostTeam], T]) -> T:
        """Run `work` on the team of this host's ranks, in the order of all calls. Needs `shares_memory`.

        All ranks call it together. Errors call it `name`.
        """
        return self._memory.on_host(name, work)

    def exchange_async(
        self, x: torch.Tensor, dest: int, out: torch.Tensor, source: int, tag: int = 0, *, may_fail: bool = False
    ) -> Pending:
        """Start to send `x` to `dest` and to fill `out` from `source`; leave both alone until `wait()`, which returns `out`.

        For neighbours that know each other's sizes: contiguous tensors, no header. An empty tensor is not sent. Operations that
        you call later do not wait for the exchange. With `may_fail` a dead neighbour breaks this exchange and nothing else: call
        `settle(seconds)` instead of `wait()`.
        """
        return messages.exchange_async(self._connection.operations, x, dest, out, source, tag, may_fail=may_fail)

    def compound_async(self, name: str, work: Callable[[Turn], torch.Tensor], x: torch.Tensor) -> Pending:
        """Queue reductions with arithmetic between them, as one operation; `wait()` returns what `work` returned.

        All ranks call it together. `work` runs in the issuing thread, and may read and write `x`; leave that alone until then.
        """
        return self._compound.start(name, work, x)

    def hotline(self, answer: Answer) -> Hotline:
        """A side channel on which ranks can ask each other while their training threads are busy. All ranks call it."""
        connection = self._connection
        address = "127.0.0.1" if connection.members.inter_size == 1 else connection.transport.address
        return Hotline(address, answer, connection.gather_objects)
