"""Errors of training that no exception shows: replicas that drift apart, NaN from one rank, the same data on every rank.

All of it is cheap enough to be on by default: parameters are compared every `AllReduce.check_every` steps by the sums of their
bits, and a NaN is looked for in a few elements, because a loss that is NaN makes all of them so.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import name_ranks
from phalanx.grad.replicas import ReplicaError, some

log = logging.getLogger("phalanx")

SAMPLE = 1024  # gradients in which a rank looks for NaN


def bit_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of the bytes of `x`, eight at a time: exact, so equal for equal contents whatever the processor, and fast."""
    dense = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    flat = dense.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()


def bit_sums(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number per parameter."""
    return torch.stack([bit_sum(p).cpu() for p in params]) if params else torch.zeros(0, dtype=torch.int64)


def check_drift(params: Sequence[torch.Tensor], names: Sequence[str], comm: Communicator, step: int) -> None:
    """Raise, on all ranks, where replicas that began equal have become different."""
    sums = bit_sums(params)
    ends = torch.stack([sums.sum(), -sums.sum()])
    if int(comm.all_reduce(ends, op="max").sum()) == 0:
        return
    every = [tuple(own.tolist()) for own in comm.allgather(sums)]
    usual = max(every, key=every.count)
    who = [rank for rank, own in enumerate(every) if own != usual]
    where = [name for name, own in zip(names, zip(*every)) if len(set(own)) > 1]
    raise ReplicaError(
        f"after step {step} the parameters of {name_ranks(who)} differ from the other ranks', in {some(where)}. They were equal "
        "at the first step. Usual reasons: gradients or parameters changed by hand on one rank, a checkpoint loaded on one rank, "
        "different learning rates, a step that one rank skipped. phalanx.bcast_parameters(model, comm) makes them equal again"
    )


def warn_of_nan(mine: bool, comm: Communicator, step: int) -> None:
    """Name the ranks whose gradients are not finite, on all ranks; called by all of them."""
    who = [rank for rank, bad in enumerate(comm.allgather_obj(mine)) if bad]
    if who:
        warnings.warn(
            f"step {step}: the gradients of {name_ranks(who)} are not finite, so neither is the mean on any rank. Look at the "
            "loss and the data of that rank. This is said once",
            stacklevel=2,
        )


def warn_of_equal_gradients(gradients: Sequence[torch.Tensor], comm: Communicator) -> None:
    """Warn, on rank 0, if all ranks come with the same first gradients: they read the same samples. Called by all of them."""
    dense = [g for g in gradients if g.layout is torch.strided]
    every = comm.allgather_obj(int(bit_sums(dense).sum()))
    if comm.rank == 0 and len(set(every)) == 1 and any(bool(g.any()) for g in dense):
        log.warning(
            "phalanx: all %d ranks have the same first gradients: do they read the same data? Give each rank its share with "
            "phalanx.scatter_dataset(dataset, comm), or with torch's DistributedSampler",
            comm.size,
        )
