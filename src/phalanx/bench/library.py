"""The collectives of torch.distributed as contenders: what you would call without Phalanx."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def library_all_reduce(x: torch.Tensor) -> None:
    """Sum `x` over the default process group, in place."""
    dist.all_reduce(x)


def library_fp16_hook() -> Any:
    """DDP's own 16-bit compression."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return fp16_compress_hook
