"""Equal replicas at the start: the same seed on all ranks, or one broadcast.

Fujitsu (arXiv 1903.12650) initialises every process with the same seed and sends nothing; at thousands of ranks a broadcast of
the model is seconds of a record that takes seventy. Where a model is loaded on one rank only, `bcast_parameters` is the way.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices): models built after it are equal on all ranks."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: an int from 0 to 2**32 - 1, which is what all three generators take")
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # torch loads it; this room has no use for it
        numpy.random.seed(seed)


def bcast_parameters(model: torch.nn.Module, comm: Any, root: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `root`, in one message per dtype and device."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for x in dict.fromkeys(tensors):
        kinds.setdefault((x.dtype, x.device), []).append(x)
    with torch.no_grad():
        for members in kinds.values():
            flat = torch.cat([x.detach().reshape(-1) for x in members])
            comm.bcast(flat, root)
            at = 0
            for x in members:
                x.copy_(flat[at : at + x.numel()].view(x.shape))
                at += x.numel()
