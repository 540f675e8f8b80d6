"""The averager in its simplest form: after a backward, replace every gradient by its mean over the ranks, one by one.

Read this first. `averager.py` gives the same numbers, faster: it puts gradients into groups, sends groups while backward still
runs, and notices when ranks or gradients are not what it expects. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from phalanx.comm.communicator import Communicator


def average_gradients(params: Iterable[torch.nn.Parameter], comm: Communicator) -> None:
    """Average all gradients. All ranks call it with the same parameters in the same order. A missing gradient counts as zeros."""
    for p in params:
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            comm.all_reduce(p.grad, op="mean")
