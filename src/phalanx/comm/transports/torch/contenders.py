"""What `phalanx bench` compares with: torch.distributed as it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def library_all_reduce(x: torch.Tensor) -> None:
    """torch.distributed's own sum over the default group."""
    dist.all_reduce(x)


def library_fp16_hook() -> Any:
    """DDP's own 16-bit compression."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return fp16_compress_hook
