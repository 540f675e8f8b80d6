"""Plain objects: numbers, strings, lists, dicts and tensors travel as bytes, without pickle.

Fourth layer of a communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.comm.arguments import check_op, check_rank
from phalanx.comm.envelope import pack, unpack
from phalanx.comm.messages import Messages
from phalanx.comm.reductions import ReduceOp


class Objects(Messages):
    """Objects from one rank to others."""

    def bcast_obj(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on all ranks."""
        check_rank(root, "root", self.size)
        return unpack(self.bcast(pack(obj) if self.rank == root else None, root))

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks as a list at `root`, None elsewhere."""
        packed = self.gather(pack(obj), root)
        return None if packed is None else [unpack(x) for x in packed]

    def allgather_obj(self, obj: Any) -> list[Any]:
        """The objects of all ranks as a list, on all ranks."""
        return [unpack(x) for x in self.allgather(pack(obj))]

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Rank i gets objs[i] of `root`."""
        check_rank(root, "root", self.size)
        if self.rank == root and (objs is None or len(objs) != self.size):
            raise ValueError(f"scatter_obj: the root passes a list of {self.size} objects, one per rank")
        return unpack(self.scatter([pack(obj) for obj in objs] if self.rank == root and objs is not None else None, root))

    def allreduce_obj(self, obj: Any, op: ReduceOp = "sum") -> Any:
        """Python's `+` (or max, min, mean) over the objects in rank order, on all ranks."""
        check_op(op)
        objs = self.allgather_obj(obj)
        if op in ("max", "min"):
            return max(objs) if op == "max" else min(objs)
        total = objs[0]
        for other in objs[1:]:
            total = total + other
        return total / self.size if op == "mean" else total

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.send(pack(obj), dest, tag)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        return unpack(self.recv(source, tag))
