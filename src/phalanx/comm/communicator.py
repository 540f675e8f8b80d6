"""The communicator: MPI's verbs on tensors and plain objects, with a bounded wait and an error that names the missing ranks.

A `Communicator` owns a `Connection` and hands each verb to a function or a small object: `reductions`, `broadcast`, `messages`,
`objects`. Each checks its arguments in the calling thread, then becomes one operation (`operations.py`) on the issuing thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from phalanx.comm import barrier, messages
from phalanx.comm.broadcast import Broadcast
from phalanx.comm.compound import Compound
from phalanx.comm.connection import Connection
from phalanx.comm.memory import Memory
from phalanx.comm.objects import ObjectVerbs
from phalanx.comm.pending import Pending
from phalanx.comm.reduce_scatter import ReduceScatter
from phalanx.comm.reductions import ReduceOp, Reductions
from phalanx.comm.room_verbs import RoomVerbs
from phalanx.comm.runner import Runner
from phalanx.comm.user_schedules import UserSchedules
from phalanx.schedule import Schedule


class Communicator(ObjectVerbs, RoomVerbs):
    """A set of ranks that communicate. Make one with `create_communicator`, `run_local` or `split`.

    All ranks call the same collective verbs in the same order. Tensors are dense, on the CPU or a GPU, of any common dtype; they
    may be 0-d, empty or non-contiguous. Verbs that end in `_obj` carry plain data instead.

    Raises:
        CommunicationError: From any verb, when a rank is missing, has failed, or called something else.
        TypeError, ValueError: From any verb, before anything is sent, when an argument is wrong.

    Example:
        >>> with phalanx.create_communicator() as comm:  # a world of one, when no launcher started this process
        ...     comm.all_reduce(torch.ones(3)).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, connection: Connection) -> None:
        operations, shared = connection.operations, connection.shared
        runner = Runner(operations, shared=shared)
        self._connection, self._members, self._operations = connection, connection.members, operations
        self._reductions = Reductions(operations, runner, connection.algorithm, shared=shared)
        self._reduce_scatter = ReduceScatter(operations, self._reductions)
        self._schedules = UserSchedules(operations, runner)
        self._broadcast = Broadcast(operations, runner)
        self._memory = Memory(operations, shared=shared)
        self._compound = Compound(operations, runner, self._reductions)

    def __repr__(self) -> str:
        who = f"{self._members.name}: rank {self.rank} of {self.size}"
        return f"<Communicator {who}, {self.inter_size} host(s), {self.schedule.name}>"

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._members.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._members.size

    @property
    def intra_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self._members.intra_rank

    @property
    def intra_size(self) -> int:
        """The number of ranks on this host."""
        return len(self._members.on_this_host)

    @property
    def inter_rank(self) -> int:
        """The number of this host."""
        return self._members.inter_rank

    @property
    def inter_size(self) -> int:
        """The number of hosts."""
        return self._members.inter_size

    @property
    def schedule(self) -> Schedule:
        """The schedule of an all-reduce of more than a few KiB."""
        return self._reductions.schedule

    # ---- reductions --------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum", *, label: str = "") -> torch.Tensor:
        """Reduce a tensor over all ranks, in place.

        Args:
            x: The tensor; every rank passes the same shape and dtype, and gets the result in it.
            op: "sum", "mean", "max" or "min".
            label: What `x` is. It is part of the operation's name, so ranks that pass different labels get an error.

        Returns:
            `x`.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.all_reduce(torch.tensor([1.0 + comm.rank])).item())
            [3.0, 3.0]
        """
        return self._reductions.all_reduce(x, op, label)

    def all_reduce_async(self, x: torch.Tensor, op: ReduceOp = "sum", *, label: str = "") -> Pending:
        """Start an all-reduce and return at once.

        Args:
            x: As in `all_reduce`. Do not touch it until `wait()` returns.
            op: As in `all_reduce`.
            label: As in `all_reduce`.

        Returns:
            A `Pending`: its `wait()` returns `x`.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.all_reduce_async(torch.ones(1), "mean").wait().item())
            [1.0, 1.0]
        """
        return self._reductions.all_reduce_async(x, op, label)

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce a tensor over all ranks and return this rank's part of it.

        Args:
            x: A tensor whose dim 0 is divisible by `size`; it is not changed.
            op: As in `all_reduce`.

        Returns:
            Part number `rank` of the result, cut along dim 0.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.reduce_scatter(torch.tensor([1, 2])).tolist())
            [[2], [4]]
        """
        return self._reduce_scatter.reduce_scatter(x, op)

    def run(self, schedule: Schedule, x: torch.Tensor) -> torch.Tensor:
        """Run any schedule for this number of ranks on `x`, in place, and return `x`. The first time, it is verified."""
        return self._schedules.run(schedule, x)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        barrier.wait_for_all(self._operations, self._reductions)

    # ---- tensors from rank to rank -----------------------------------------------------------------------------------------

    def bcast(self, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
        """Broadcast a tensor of the root to all ranks.

        Args:
            x: The tensor on the root. Other ranks pass None, or a tensor of the same shape and dtype to fill.
            root: The rank that sends.

        Returns:
            The tensor: `x` itself where you passed one.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.bcast(torch.tensor([7]) if comm.rank == 0 else None).item())
            [7, 7]
        """
        return self._broadcast.bcast(x, root)

    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        """Collect one tensor of every rank on the root.

        Args:
            x: The tensor; shapes and dtypes may differ between ranks.
            root: The rank that receives.

        Returns:
            The tensors in rank order on the root, None on the other ranks.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.gather(torch.tensor(comm.rank)))
            [[tensor(0), tensor(1)], None]
        """
        return messages.gather(self._operations, x, root)

    def allgather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect one tensor of every rank on all ranks.

        Args:
            x: The tensor; shapes and dtypes may differ between ranks.

        Returns:
            The tensors in rank order.

        Example:
            >>> phalanx.run_local(2, lambda comm: [len(x) for x in comm.allgather(torch.ones(comm.rank))])
            [[0, 1], [0, 1]]
        """
        return messages.allgather(self._operations, x)

    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        """Send tensor i of the root's list to rank i.

        Args:
            xs: One tensor per rank on the root, None on the other ranks; shapes and dtypes may differ.
            root: The rank that sends.

        Returns:
            This rank's tensor.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.scatter([torch.zeros(1), torch.ones(2)] if comm.rank == 0 else None))
            [tensor([0.]), tensor([1., 1.])]
        """
        return messages.scatter(self._operations, xs, root)

    def alltoall(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send one tensor to every rank, and receive one from every rank.

        Args:
            xs: `xs[j]` goes to rank j; shapes and dtypes may differ, and tensors may be empty.

        Returns:
            A list whose element j came from rank j.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.alltoall([torch.tensor(10 * comm.rank + j) for j in range(2)]))
            [[tensor(0), tensor(10)], [tensor(1), tensor(11)]]
        """
        return messages.alltoall(self._operations, xs)

    def send(self, x: torch.Tensor, dest: int, tag: int = 0) -> None:
        """Send a tensor to one rank; returns when that rank receives it. Messages of one pair and tag arrive in order.

        Args:
            x: The tensor.
            dest: The rank that receives.
            tag: A whole number; the receiver passes the same.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.send(torch.ones(2), 1) if comm.rank == 0 else comm.recv(0).tolist())
            [None, [1.0, 1.0]]
        """
        messages.send(self._operations, x, dest, tag)

    def recv(self, source: int, tag: int = 0) -> torch.Tensor:
        """Receive the next tensor that one rank has sent.

        Args:
            source: The rank that sends.
            tag: A whole number; the sender passes the same.

        Returns:
            The tensor, with the shape and dtype it had there.
        """
        return messages.recv(self._operations, source, tag)

    # ---- other communicators, and the end ------------------------------------------------------------------------------------

    def split(self, color: int, key: int = 0) -> Communicator:
        """Make a communicator of the ranks that pass the same `color`.

        Args:
            color: Ranks with the same color end up together.
            key: Orders the ranks of the new communicator; ties keep the order of this one.

        Returns:
            The communicator of this rank's color, with the options of this one.

        Example:
            >>> phalanx.run_local(4, lambda comm: comm.split(comm.rank % 2).allgather_obj(comm.rank))
            [[0, 2], [1, 3], [0, 2], [1, 3]]
        """
        if not isinstance(color, int) or not isinstance(key, int):
            raise TypeError(f"split takes ints, got color {color!r} and key {key!r}")
        color, key = int(color), int(key)  # True is 1, also in the name by which the new ranks find each other
        return Communicator(self._connection.split(color, self.allgather_obj((color, key))))

    def survivors(self, ranks: Sequence[int]) -> Communicator:
        """Make a communicator of `ranks` without a message, and so without shared memory. All of them call it."""
        return Communicator(self._connection.survivors(ranks))

    def close(self) -> None:
        """Finish what is queued, then close. Closing a split communicator leaves its parent open. Idempotent."""
        self._connection.close()

    def part(self) -> None:
        """Close this communicator and its parents. From now on an exception of this rank does not end the others."""
        self._connection.close_all()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # after an exception the connections stay open until the exit hook has published it
        if kind is None:
            self.close()
