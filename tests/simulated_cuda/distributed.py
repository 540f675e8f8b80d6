"""The module `torch.distributed` as the product sees it: a world per simulated job, NCCL for device tensors, gloo for others."""

from __future__ import annotations

import datetime
import types
from typing import Any

import torch.distributed as dist
from tests.simulated_cuda import nccl
from tests.simulated_cuda.collectives import (
    P2POp,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    barrier,
    batch_isend_irecv,
    broadcast,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter_tensor,
    send,
)
from tests.simulated_cuda.groups import destroy_process_group, group_of, init_process_group, new_group, world
from tests.simulated_cuda.simulation import process
from tests.simulated_cuda.store import PrefixStore, Store, TCPStore


class _WorldOf:
    @property
    def WORLD(self) -> Any:  # noqa: N802
        found = process().own.get("world")
        return found.everyone if found else None


FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        init_process_group, destroy_process_group, new_group, all_reduce, reduce_scatter_tensor, all_gather_into_tensor, reduce,
        broadcast, all_gather, barrier, isend, irecv, send, recv, batch_isend_irecv, P2POp, PrefixStore, TCPStore,
    )
} | {"reduce_scatter_single": reduce_scatter_tensor, "all_gather_single": all_gather_into_tensor}  # fmt: skip


class Distributed(types.ModuleType):
    """`import torch.distributed as dist` in the product; constants and types are the real ones."""

    def __init__(self) -> None:
        super().__init__("torch.distributed (simulated)")
        vars(self).update(FUNCTIONS)
        self.Store = Store
        self.group = _WorldOf()
        self.distributed_c10d = types.SimpleNamespace(
            _get_default_store=lambda: world().store,
            _set_pg_timeout=lambda *a: None,
            _abort_process_group=lambda group=None: nccl.abort(process(), group),
        )
        self.abort = self.distributed_c10d._abort_process_group

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return "world" in process().own

    def get_rank(self, group: Any = None) -> int:
        return process().rank if group is None else group_of(group).ranks.index(process().rank)

    def get_world_size(self, group: Any = None) -> int:
        return len(group_of(group).ranks)

    def get_backend(self, group: Any = None) -> str:
        return "cpu:gloo,cuda:nccl"

    def get_backend_config(self, group: Any = None) -> str:
        return "cpu:gloo,cuda:nccl"

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(group_of(group).ranks)

    def set_timeout(self, timeout: datetime.timedelta, group: Any = None) -> None:
        pass
