"""Verbs on plain objects: numbers, strings, lists and dicts are sent as tensors of bytes, without pickle.

Each verb is built on the tensor verb of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from phalanx.comm.arguments import check_op, check_rank
from phalanx.comm.envelope import pack, unpack
from phalanx.comm.reductions import ReduceOp


class TensorVerbs(Protocol):
    """The tensor verbs that the object verbs need."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def bcast(self, x: torch.Tensor | None, root: int = 0) -> torch.Tensor: ...
    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None: ...
    def allgather(self, x: torch.Tensor) -> list[torch.Tensor]: ...
    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor: ...
    def send(self, x: torch.Tensor, dest: int, tag: int = 0) -> None: ...
    def recv(self, source: int, tag: int = 0) -> torch.Tensor: ...


class ObjectVerbs:
    """Verbs on plain data: None, bool, int, float, str, bytes, list, tuple and dict. Any other type raises TypeError."""

    def bcast_obj(self: TensorVerbs, obj: Any, root: int = 0) -> Any:
        """Broadcast an object of the root to all ranks.

        Args:
            obj: Plain data on the root; ignored on the other ranks.
            root: The rank that sends.

        Returns:
            The root's object, on every rank.

        Raises:
            TypeError: The object is not plain data.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.bcast_obj({"lr": 0.1} if comm.rank == 0 else None))
            [{'lr': 0.1}, {'lr': 0.1}]
        """
        check_rank(root, "root", self.size)
        return unpack(self.bcast(pack(obj) if self.rank == root else None, root))

    def gather_obj(self: TensorVerbs, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect one object of every rank on the root.

        Args:
            obj: Plain data.
            root: The rank that receives.

        Returns:
            The objects in rank order on the root, None on the other ranks.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.gather_obj(f"rank {comm.rank}"))
            [['rank 0', 'rank 1'], None]
        """
        packed = self.gather(pack(obj), root)
        return None if packed is None else [unpack(x) for x in packed]

    def allgather_obj(self: TensorVerbs, obj: Any) -> list[Any]:
        """Collect one object of every rank on all ranks.

        Args:
            obj: Plain data.

        Returns:
            The objects in rank order, on every rank.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.allgather_obj(comm.rank * 10))
            [[0, 10], [0, 10]]
        """
        return [unpack(x) for x in self.allgather(pack(obj))]

    def scatter_obj(self: TensorVerbs, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Send object i of the root's list to rank i.

        Args:
            objs: One object per rank on the root, None on the other ranks.
            root: The rank that sends.

        Returns:
            This rank's object.

        Raises:
            ValueError: The root's list does not have one object per rank.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.scatter_obj(["a", "b"] if comm.rank == 0 else None))
            ['a', 'b']
        """
        check_rank(root, "root", self.size)
        if self.rank == root and (objs is None or len(objs) != self.size):
            raise ValueError(f"scatter_obj: the root passes a list of {self.size} objects, one per rank")
        return unpack(self.scatter([pack(obj) for obj in objs] if self.rank == root and objs is not None else None, root))

    def allreduce_obj(self: TensorVerbs, obj: Any, op: ReduceOp = "sum") -> Any:
        """Reduce one object of every rank with Python's own operators, in rank order.

        Args:
            obj: Plain data that supports the operator: numbers, or for "sum" also str, bytes, list and tuple.
            op: "sum" (`+`), "mean", "max" or "min".

        Returns:
            The result, on every rank.

        Example:
            >>> phalanx.run_local(2, lambda comm: comm.allreduce_obj([comm.rank]))
            [[0, 1], [0, 1]]
        """
        check_op(op)
        objs = [unpack(x) for x in self.allgather(pack(obj))]
        if op in ("max", "min"):
            return max(objs) if op == "max" else min(objs)
        total = objs[0]
        for other in objs[1:]:
            total = total + other
        return total / self.size if op == "mean" else total

    def send_obj(self: TensorVerbs, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to one rank, which receives it with `recv_obj`.

        Args:
            obj: Plain data.
            dest: The rank that receives.
            tag: A whole number; the receiver passes the same.
        """
        self.send(pack(obj), dest, tag)

    def recv_obj(self: TensorVerbs, source: int, tag: int = 0) -> Any:
        """Receive an object that `source` has sent with `send_obj`.

        Args:
            source: The rank that sends.
            tag: A whole number; the sender passes the same.

        Returns:
            The object.
        """
        return unpack(self.recv(source, tag))
