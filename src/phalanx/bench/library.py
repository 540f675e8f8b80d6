"""The collectives of torch.distributed as contenders, as you would call them without Phalanx."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def library_all_reduce(x: torch.Tensor) -> None:
    """Sum `x` over the default process group, in place."""
    dist.all_reduce(x)


def library_hooks(rank: int) -> dict[str, Any]:
    """DDP's own compression hooks for `register_comm_hook`, by name. Low-rank gradients have `rank` columns."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    # the hook cannot start earlier; the epsilon keeps zero gradients from becoming NaN
    low = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
    return {"fp16": (None, fp16_compress_hook), "bf16": (None, bf16_compress_hook), "PowerSGD": (low, powerSGD_hook)}
