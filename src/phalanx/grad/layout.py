"""Decides which gradients are sent together, and where they are. All ranks agree once, after the first backward.

The order is the one in which rank 0 computed its gradients. Gradients that rank 0 has not seen come last, from the back of the
network. The ranks compare their parameters here, and continue only if they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.arena import Arena
from phalanx.grad.groups import even, growing
from phalanx.grad.measure import SMALLEST, encoded_bucket, measure_bucket
from phalanx.grad.reducer import Group
from phalanx.grad.replicas import check_replicas
from phalanx.grad.wires import Wire, remembers
from phalanx.grad.wires.carrier import carrier_of, rows_of

Kind = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def kind_of(p: torch.Tensor) -> Kind:
    """Return all that determines the place of a parameter's gradient. The stride of a dimension of size 1 means nothing."""
    return p.dtype, p.device, p.shape, tuple(step if size != 1 else 0 for size, step in zip(p.shape, p.stride()))


def place_of(p: torch.nn.Parameter, group: Group) -> range:
    """Return the place of the gradient of `p` in the group."""
    first = group.arena.starts[p] - (group.flat.storage_offset() - group.arena.flat.storage_offset())
    return range(first, first + p.numel())


def agree_on_groups(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    seen: Mapping[torch.nn.Parameter, int],
    comm: Communicator,
    sync: AllReduce,
    *,
    wire: Wire | None,
    bucket_bytes: int | None,
    delayed: bool,
) -> list[Group]:
    """Return the groups of the parameters that are trained now, in sending order. All ranks call it.

    `seen` maps each parameter to the number of pieces of its gradient in this rank's last backward, in the order of their
    arrival. A gradient in several pieces keeps its group until the end of backward, on all ranks.
    """
    options: list[Any] = [repr(replace(sync, record=False)), delayed, str(wire), bucket_bytes]
    check_replicas(params, names, options, comm)
    number = {p: i for i, p in enumerate(params)}
    order = [number[p] for p in dict.fromkeys([*seen, *reversed(params)]) if p in number and p.requires_grad]
    several = [number[p] for p, pieces in seen.items() if pieces > 1 and p in number]
    device = params[order[0]].device if order else torch.device("cpu")
    if bucket_bytes is not None:
        bucket = bucket_bytes
    elif sum(p.nbytes for p in params) <= SMALLEST:  # one group, whatever a measurement would say
        bucket = SMALLEST
    else:
        bucket = measure_bucket(comm, device)
        if remembers(wire) and comm.inter_size > 1:
            bucket = encoded_bucket(bucket, sum(params[i].nbytes for i in order if params[i].dtype is torch.float32))
    order, bucket = comm.bcast_obj((order, bucket))
    late = {i for own in comm.allgather_obj(several) for i in own}
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in order:
        by_kind.setdefault((params[i].dtype, params[i].device), []).append(i)
    made: list[tuple[int, Group]] = []
    for members in by_kind.values():
        own = [params[i] for i in members]
        sizes = [p.numel() * p.element_size() for p in own]
        runs = growing(len(own), sync.growing) if sync.growing is not None else even(sizes, bucket)
        arena = Arena(own, runs, multiple=comm.multiple, allocate=comm.buffer)
        for run, flat in zip(runs, arena.groups):
            travels = comm.buffer(flat.numel(), flat.dtype, flat.device) if delayed else flat
            early = not any(members[i] in late for i in run)
            group = Group(arena, flat, [own[i] for i in run], travels, None, early, missing=len(run))
            shapes = {place_of(p, group): rows_of(p) for p in group.params}
            group.wire = carrier_of(wire, comm, flat, shapes=shapes, number=len(made))
            made.append((order.index(members[run[-1]]), group))
    made.sort(key=lambda item: item[0])  # by when the last gradient was computed; the same on all ranks
    return [group for _, group in made]
