"""Checks that all ranks start equal. If parameters, shapes or options differ, all ranks raise an error that names them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.envelope import bytes_of


class ReplicaError(RuntimeError):
    """Ranks that should hold the same parameters do not. The message names the ranks and the parameters.

    Example:
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(model.weight, comm.rank)  # different on each rank
        ...     opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     opt.step()
        >>> try:
        ...     phalanx.run_local(2, train)
        ... except phalanx.ReplicaError as error:
        ...     "bcast_parameters" in str(error)
        True
    """


def check_replicas(
    params: Sequence[torch.nn.Parameter], names: Sequence[str], options: Sequence[Any], comm: Communicator
) -> None:
    """Raise, on all ranks, if parameters or options differ."""
    kinds = [(list(p.shape), str(p.dtype), list(p.stride()), p.requires_grad) for p in params]
    prints = [_fingerprint(p) for p in params]
    if not odd(comm.allgather_obj(_digest((options, kinds, prints)))):
        return
    if who := odd(comm.allgather_obj(_digest(options))):
        raise ReplicaError(f"the options of create_multi_node_optimizer differ between ranks: {who} from rank 0")
    remedy = "Build the model after phalanx.seed_everything(seed) on all ranks, or call phalanx.bcast_parameters(model, comm)"
    if who := odd(comm.allgather_obj(_digest(kinds))):
        raise ReplicaError(
            f"the number of parameters, their shapes, dtypes, memory formats or requires_grad differ between ranks: {who} "
            "from rank 0"
        )
    told = comm.allgather_obj(prints)
    differing = [name for name, own in zip(names, zip(*told)) if len(set(own)) > 1]
    raise ReplicaError(f"the parameters differ between ranks: {odd(told)} from rank 0, in {some(differing)}. {remedy}")


def _fingerprint(p: torch.Tensor) -> int:
    """Return a number that differs for different contents, or the same contents in another order."""
    dense = torch.view_as_real(p.detach().resolve_conj()) if p.is_complex() else p.detach()
    return zlib.crc32(bytes_of(dense.contiguous()).cpu().numpy().data)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def odd(values: Sequence[Any]) -> str:
    """Name the ranks whose value differs from rank 0's. Empty if there are none."""
    others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""


def some(names: Sequence[str]) -> str:
    """Join the first few of many names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
