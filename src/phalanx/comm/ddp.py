"""A communication hook that runs Phalanx schedules inside DistributedDataParallel."""

# no `from __future__ import annotations` here: DDP checks that the annotations of a hook are types
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.communicator import Communicator
from phalanx.comm.cores import has_idle_core
from phalanx.comm.heap import keep_freed_memory

# buckets that wait for the last bucket of their backward
_held: weakref.WeakKeyDictionary[Communicator, list[Any]] = weakref.WeakKeyDictionary()


def ddp_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average DDP's gradients with Phalanx: a hook for `DistributedDataParallel.register_comm_hook`.

    Args:
        comm: A communicator with the same ranks as DDP's process group.
        bucket: The gradients, as DDP passes them.

    Returns:
        A future with the mean over all ranks.

    Raises:
        TypeError: `comm` is not a communicator, or the gradient is sparse.

    Example:
        >>> model = DistributedDataParallel(model)  # doctest: +SKIP
        >>> model.register_comm_hook(comm, phalanx.ddp_hook)  # doctest: +SKIP
    """
    if not isinstance(comm, Communicator):
        raise TypeError(f"ddp_hook needs a communicator: register_comm_hook(comm, ddp_hook), got {type(comm).__name__}")
    gradients = bucket.buffer()
    if gradients.layout != torch.strided:
        raise TypeError(
            f"ddp_hook cannot average the sparse gradient of a parameter of shape {tuple(gradients.shape)}:"
            " make the layer with sparse=False, or use DDP without this hook"
        )
    if comm not in _held:
        _held[comm] = []
        if gradients.is_cpu:
            keep_freed_memory()  # `zero_grad` frees gradients, and the next backward makes them again
    # the label turns buckets in a different order on two ranks into an error, instead of a sum of unrelated gradients
    label = f"DDP bucket {bucket.index()}"
    if gradients.is_cpu and comm.shares_memory and not has_idle_core(comm.size):
        return _with_the_last(comm, bucket, gradients, label)
    pending = comm.all_reduce_async(gradients, op="mean", label=label)
    if pending.queued:  # on a GPU, where readers of the future wait on the device and the host never waits
        return pending.as_future(gradients.device)
    # torch needs the device of a future that holds a CUDA tensor, and accepts none for the CPU
    begun: Any = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    # An error must be raised in a callback. Future.set_exception only stores it as a value, and a rank that has left
    # `Join` reads no value: it would miss the error and hang in the next collective.
    averaged = begun.then(lambda _: pending.wait())
    # a thread has to call `wait`, because only `wait` finds out why a group hangs
    threading.Thread(target=begun.set_result, args=[None], name="phalanx-ddp-bucket", daemon=True).start()
    return averaged


def _with_the_last(
    comm: Communicator, bucket: dist.GradBucket, gradients: torch.Tensor, label: str
) -> torch.futures.Future[torch.Tensor]:
    """Average in the calling thread when the last bucket is ready. Other threads would only take the core from backward."""
    begun: Any = torch.futures.Future()
    averaged = begun.then(lambda _: comm.all_reduce(gradients, "mean", label=label))  # in a callback: see `ddp_hook`
    held = _held[comm]
    held.append(begun)
    if bucket.is_last():
        _held[comm] = []
        for each in held:
            each.set_result(None)
    return averaged
