"""Memory for batches that is used again when a batch is gone.

A batch of 64 images of 224 x 224 in float32 has 38 MB. Fresh from the kernel it is zeroed first, page by page, and given back
when the batch dies: longer work than the arithmetic of normalising. So what a dead batch leaves behind serves the next one.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes; below it malloc itself keeps what is freed
MOST_FREE = 8  # blocks kept for later: two loaders with two workers that prefetch; the oldest go first

_free: list[np.ndarray] = []
_lock = threading.RLock()  # a batch may die, and come back here, while this very thread is in here


def _begin_anew() -> None:
    """In a forked child: another thread may have held the lock, and what is free belongs to the parent's memory."""
    global _lock
    _lock = threading.RLock()
    _free.clear()


os.register_at_fork(after_in_child=_begin_anew)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor; its memory returns when the last tensor that shares it is gone, in whatever thread."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(list(shape), dtype=dtype)
    with _lock:
        at = next((at for at in reversed(range(len(_free))) if _free[at].nbytes == size), None)  # the newest may be in a cache
        block = _free.pop(at) if at is not None else np.empty(size, dtype=np.uint8)  # numpy asks for huge pages, torch does not
    lent = block[:]  # this object ends when the tensor is gone; the block itself lives on
    weakref.finalize(lent, _take_back, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(*shape)


def _take_back(block: np.ndarray) -> None:
    with _lock:
        _free.append(block)
        del _free[:-MOST_FREE]
