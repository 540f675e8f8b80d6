"""Every private name of torch that Phalanx uses. No other file names one; `tests/test_rooms.py` checks that.

CI runs tests with torch 2.6, the oldest version that we support, and with 2.13. Where these versions differ a comment says how;
all other names are in both.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

# ---- many tensors in one call: what torch.optim itself uses -------------------------------------------------------------------

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
fused_sgd_ = torch._fused_sgd_  # does not count its writes: call torch.autograd.graph.increment_version after it

# ---- autograd: what DDP and FSDP use ------------------------------------------------------------------------------------------


def graph_task_id() -> int:
    """The number of the backward that runs in this thread."""
    return torch._C._current_graph_task_id()


def queue_callback(call: Callable[[], None]) -> None:
    """Call it at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_inside_a_node() -> bool:
    """Whether autograd evaluates a node in this thread."""
    return torch._C._current_autograd_node() is not None


# ---- tensors ------------------------------------------------------------------------------------------------------------------


def version_of(x: torch.Tensor) -> int:
    """How often the tensor was written to in place."""
    return x._version


def other_views(x: torch.Tensor) -> int | None:
    """How many other tensors use the memory of `x`; None where this torch cannot tell."""
    count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(x.untyped_storage()._cdata) - _count_of_a_lone_tensor()


@functools.cache
def _count_of_a_lone_tensor() -> int:
    """Versions of torch differ in whether the object that asks counts: 1 in torch 2.6, 2 in torch 2.13."""
    lone = torch.empty(1)
    return torch._C._storage_Use_Count(lone.untyped_storage()._cdata)


# ---- modules and optimizers ---------------------------------------------------------------------------------------------------

BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # the parent of all batch norms


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after its step, its own or those of all optimizers."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step divides by a GradScaler's scale and skips an overflow, both on the device: torch's fused optimizers do.

    Not SGD: if the very first gradients overflow, its velocity is left uninitialised (seen with torch 2.13).
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not isinstance(optimizer, torch.optim.SGD)


# ---- data ---------------------------------------------------------------------------------------------------------------------


def set_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> None:
    """What torch.utils.data.get_worker_info() answers in this process from now on."""
    from torch.utils.data._utils import worker as module

    module._worker_info = module.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


def collate_in_own_memory() -> None:
    """Have `default_collate` stack tensors in ordinary memory, in this process.

    In a worker torch stacks them in a file of /dev/shm. If the worker is killed while torch allocates it, the file stays.
    """
    from torch.utils.data._utils import collate as module

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if batch[0].is_nested or batch[0].layout is not torch.strided:
            return module.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # raises
        return torch.stack(batch)

    if module.default_collate_fn_map[torch.Tensor] is module.collate_tensor_fn:  # and not a user's own
        module.default_collate_fn_map[torch.Tensor] = stack


# ---- CUDA, for `phalanx selftest` ----------------------------------------------------------------------------------------------


def has_context(device: int) -> bool | None:
    """Whether this process has a context on this GPU; None where this torch cannot tell. Asking makes none."""
    ask: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return None if ask is None else ask(device)


def keep_busy(cycles: int) -> None:
    """Occupy the current stream of the GPU for this many cycles of its clock; returns at once."""
    sleep: Callable[[int], None] = torch.cuda._sleep
    sleep(cycles)


# ---- torch.distributed --------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set the timeout of the default process group: dist.set_timeout in newer versions of torch, which deprecate the old name."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout)


def abort_nccl(groups: Iterable[Any]) -> None:
    """End what NCCL is doing in these groups. torch 2.6 calls it `_abort`, newer versions `abort`."""
    members = [group for group in dict.fromkeys(groups) if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER]
    engines = [group._get_backend(torch.device("cuda")) for group in members]
    for engine in engines[:1]:
        engine._group_start()  # together: one abort may wait for another communicator of the same device
    for engine in engines:
        (getattr(engine, "abort", None) or engine._abort)()
    for engine in engines[:1]:
        engine._group_end()


def work_of(future: Any) -> Any:
    """A Work of C++ that ends with a future."""
    c10d: Any = torch._C._distributed_c10d  # its types leave the function out
    return c10d._create_work_from_future(future)


def is_excepthook(hook: Any) -> bool:
    """Whether it is the hook that init_process_group installs, which adds the rank to what Python prints."""
    return getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
