"""The function that turns any torch optimizer into a multi-node one, and the options that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.allreduce import AllReduce
from phalanx.grad.gossip import Gossip, level_of
from phalanx.grad.local import DiLoCo, LocalSGD
from phalanx.grad.sparse import wants_sparse
from phalanx.grad.wires import PowerSGD, Wire, remembers
from phalanx.optim.multi_node import MultiNodeOptimizer
from phalanx.optim.wrapped import WrappedOptimizer

if TYPE_CHECKING:
    from phalanx.optim.gossip_step import GossipOptimizer
    from phalanx.optim.local_step import LocalOptimizer


@overload
def create_multi_node_optimizer(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    *,
    sync: AllReduce | None = None,
    double_buffering: bool = False,
    wire: Wire | None = None,
    bucket_bytes: int | None = None,
) -> MultiNodeOptimizer: ...


@overload
def create_multi_node_optimizer(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    *,
    sync: Gossip,
    double_buffering: bool = False,
    wire: Wire | None = None,
    bucket_bytes: int | None = None,
) -> GossipOptimizer: ...


@overload
def create_multi_node_optimizer(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    *,
    sync: LocalSGD | DiLoCo,
    double_buffering: bool = False,
    wire: Wire | None = None,
    bucket_bytes: int | None = None,
) -> LocalOptimizer: ...


def create_multi_node_optimizer(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    *,
    sync: AllReduce | Gossip | LocalSGD | DiLoCo | None = None,
    double_buffering: bool = False,
    wire: Wire | None = None,
    bucket_bytes: int | None = None,
) -> MultiNodeOptimizer | GossipOptimizer | LocalOptimizer:
    """Make an optimizer average gradients over the ranks in every step. All ranks call it.

    When `backward()` returns, outside `no_sync()`, every `p.grad` is the mean over the ranks, so clipping, `GradScaler` and
    logging need no change. A missing gradient counts as zero. The ranks compare their parameters at the first step.

    Args:
        optimizer: Any torch optimizer.
        comm: The communicator.
        sync: How replicas stay together: `AllReduce(...)`, the default, `Gossip(...)`, `LocalSGD(...)` or `DiLoCo(...)`.
        double_buffering: Apply the mean gradient of the previous step. Only with `AllReduce`.
        wire: Send torch.float16, torch.bfloat16, `phalanx.Int8(...)` or `phalanx.PowerSGD(...)` instead of the uncompressed
            gradients.
        bucket_bytes: The size of a group of gradients that are sent together. By default the first steps measure it.

    Returns:
        A torch optimizer. It also has `no_sync()`, `synchronize()`, `average_()`, `follow(model)`, `spread()` and `report()`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If options exclude each other.
        ReplicaError: At the first step, if the ranks start with different parameters or options.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
        >>> for x in torch.ones(3, 8, 4):
        ...     opt.zero_grad()
        ...     model(x).sum().backward()
        ...     opt.step()
        >>> opt.steps
        3
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, WrappedOptimizer):
        raise TypeError("optimizer is a multi-node optimizer already; wrap the one inside it")
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm is what phalanx.create_communicator() returns, got {type(comm).__name__}")
    if sync is not None and not isinstance(sync, AllReduce | Gossip | LocalSGD | DiLoCo):
        raise TypeError(
            f"sync is phalanx.AllReduce(...), phalanx.Gossip(...), LocalSGD(...) or DiLoCo(...), got {type(sync).__name__}"
        )
    if isinstance(sync, LocalSGD | DiLoCo) and double_buffering:
        raise ValueError(f"double_buffering is for AllReduce; {type(sync).__name__}(overlap=True) hides its communication")
    if isinstance(sync, Gossip):
        if double_buffering:
            raise ValueError("double_buffering is for AllReduce; Gossip(overlap=True) hides its exchange behind the next step")
        if bucket_bytes is not None and level_of(comm, sync) == "rank":
            raise ValueError(f"bucket_bytes={bucket_bytes}: Gossip sends one message; only the ranks of a host have groups")
    if isinstance(sync, AllReduce) and sync.fused and (wire is not None or double_buffering or sync.weighted):
        raise ValueError("AllReduce(fused=True) sends nothing, so it excludes wire, double_buffering and weighted")
    if wants_sparse(optimizer) and (wire is not None or double_buffering or not _plain(sync)):
        raise ValueError("torch.optim.SparseAdam needs plain AllReduce(): no wire, double_buffering, weighted or Gossip")
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool)):
        raise TypeError(f"bucket_bytes={bucket_bytes!r}: an int, or None to measure")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: at least 1, or None to measure")
    if isinstance(wire, PowerSGD) and isinstance(sync, Gossip | LocalSGD | DiLoCo):
        raise ValueError(f"wire={wire!r} is for gradients that all ranks sum in every step; use AllReduce, or a 16-bit wire")
    if remembers(wire) and isinstance(sync, Gossip):
        raise ValueError(f"wire={wire!r} is for what all ranks sum; Gossip takes torch.float16 and torch.bfloat16")
    sent_as = sync.wire if isinstance(sync, DiLoCo) and sync.wire is not None else wire
    if comm.elastic and remembers(sent_as):
        raise ValueError(f"wire={sent_as!r} keeps what it rounded away, and elastic=True may send it twice: use torch.bfloat16")
    if not comm.elastic and isinstance(sync, AllReduce) and sync.on_slow in ("rebalance", "evict"):
        raise ValueError(f"AllReduce(on_slow={sync.on_slow!r}) needs create_communicator(elastic=True)")
    if comm.elastic:
        _check_elastic(optimizer, sync)
    narrow = wire if isinstance(wire, torch.dtype) else None
    if isinstance(sync, Gossip):
        from phalanx.optim.gossip_step import GossipOptimizer  # a fifth of our import time, and few scripts gossip

        return GossipOptimizer(optimizer, comm, sync, narrow, bucket_bytes)
    if isinstance(sync, LocalSGD | DiLoCo):
        from phalanx.optim.local_step import LocalOptimizer

        return LocalOptimizer(optimizer, comm, sync, wire, bucket_bytes)
    if bucket_bytes is not None and sync is not None and sync.growing is not None:
        raise ValueError(f"bucket_bytes={bucket_bytes} and growing={sync.growing}: set only one of them")
    return MultiNodeOptimizer(optimizer, comm, sync or AllReduce(), double_buffering, wire, bucket_bytes)


def _plain(sync: AllReduce | Gossip | LocalSGD | DiLoCo | None) -> bool:
    return sync is None or (isinstance(sync, AllReduce) and not sync.weighted)


def _check_elastic(optimizer: torch.optim.Optimizer, sync: AllReduce | Gossip | LocalSGD | DiLoCo | None) -> None:
    """Raise if an option excludes exchanges that are repeated after a death."""
    if isinstance(sync, Gossip | LocalSGD | DiLoCo) and sync.level == "host":
        raise ValueError(
            f"{type(sync).__name__}(level='host') excludes elastic=True, whose communicator cannot be split: use 'rank'"
        )
    if isinstance(sync, LocalSGD | DiLoCo) and sync.overlap:
        raise ValueError(
            f"{type(sync).__name__}(overlap={sync.overlap!r}) excludes elastic=True: parts in flight for several steps would be "
            "lost when a rank dies; use overlap=False"
        )
    if isinstance(sync, LocalSGD | DiLoCo) and sync.start:
        raise ValueError(
            f"{type(sync).__name__}(start={sync.start}) excludes elastic=True: a rank that dies would end those steps; "
            "leave start out"
        )
    if isinstance(sync, Gossip) and sync.topology == "hypercube":
        raise ValueError(
            "Gossip(topology='hypercube') needs a power of two, and elastic=True changes the number of ranks: use "
            "topology='dissemination' or 'exact'"
        )
    if isinstance(sync, Gossip) and sync.patience is not None:
        raise ValueError(
            f"Gossip(patience={sync.patience:g}) has no effect with elastic=True: `phalanx run` decides who is lost; leave it out"
        )
    if isinstance(sync, AllReduce) and sync.fused:
        raise ValueError("AllReduce(fused=True) updates the parameters while it sums, so elastic=True could not repeat a step")
    if wants_sparse(optimizer):
        raise ValueError("sparse gradients do not work with elastic=True, which keeps dense ones")
