"""Make a process group: shared memory first, then gloo for the rest, and NCCL where there are GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend.engine import connect
from phalanx.backend.lane import Lane
from phalanx.backend.options import algorithm_of
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.comm.addresses import interface_towards, is_loopback
from phalanx.comm.heap import keep_freed_memory
from phalanx.comm.transports.torch.transport import gloo_listens_on, host_of


def create(group: Any, options: Any) -> PhalanxProcessGroup:
    """Make the group that torch describes. All its ranks call this."""
    keep_freed_memory()  # `zero_grad` frees gradients, and the next backward makes them again
    rank, size, store = group.group_rank, group.group_size, dist.PrefixStore("phalanx", group.store)
    for_nccl = options if dist.is_nccl_available() and isinstance(options, dist.ProcessGroupNCCL.Options) else None
    algorithm = algorithm_of(None if for_nccl else options, size, whole_world=not group.global_ranks_in_group)
    name, seconds = group.group_id or "world", group.timeout.total_seconds()
    engine = connect(store, rank, size, seconds, algorithm, name, lambda: make_gloo(group, "schedules"))
    plain = dist.ProcessGroup(store, rank, size)
    made = PhalanxProcessGroup(store, rank, size, plain, engine, Lane(name, engine.explain))
    gloo, gloo_kind = make_gloo(group, "gloo"), dist.ProcessGroup.BackendType.GLOO
    for each in (plain, made):
        each._set_default_backend(gloo_kind)
        each._register_backend(torch.device("cpu"), gloo_kind, gloo)
    if dist.is_nccl_available() and torch.cuda.is_available():
        # for a group written in Python, torch does not create the other backends of "cpu:phalanx,cuda:nccl": we do
        nccl = make_nccl(group, for_nccl)
        for each in (plain, made):
            each._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    return made


def make_gloo(group: Any, prefix: str) -> Any:
    """Make a gloo group of the same ranks."""
    host = host_of(group.store)
    interface = None if host is None else interface_towards("127.0.0.1" if is_loopback(host) else host, 9)
    with gloo_listens_on(interface):
        store = dist.PrefixStore(prefix, group.store)
        gloo = dist.ProcessGroupGloo(store, group.group_rank, group.group_size, timeout=group.timeout)
    if hasattr(gloo, "options"):  # not in old versions of torch
        _describe(gloo.options, group)
    return gloo


def make_nccl(group: Any, options: Any) -> Any:
    """Make an NCCL group of the same ranks. It connects when the first GPU tensor arrives."""
    options = options or dist.ProcessGroupNCCL.Options()
    options._timeout = group.timeout
    _describe(options, group)
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", group.store), group.group_rank, group.group_size, options)
    nccl._set_sequence_number_for_group()
    return nccl


def _describe(options: Any, group: Any) -> None:
    """Copy the group's name and ranks to the options, as torch does for its own backends."""
    options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
