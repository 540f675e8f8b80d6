"""Reuse the memory of batches that are no longer referenced.

A batch of 64 images of 224 x 224 in float32 has 38 MB. The kernel zeroes fresh memory page by page, and takes it back when the
batch is freed, which takes longer than normalising it. So the memory of a freed batch is kept for the next one.
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

SMALLEST = 1 << 20  # bytes; below it, malloc itself keeps freed memory
MOST_FREE = 8  # free blocks kept: enough for two loaders with two prefetching workers; the oldest are dropped first

_free: list[np.ndarray] = []
_lock = threading.RLock()  # re-entrant: freeing a batch may call back while this thread holds it


def _reset_in_child() -> None:
    """Reset in a forked child: another thread may have held the lock, and free blocks belong to the parent."""
    global _lock
    _lock = threading.RLock()
    _free.clear()


os.register_at_fork(after_in_child=_reset_in_child)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor. Its memory is recycled when the last tensor that shares it is gone, in any thread."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(list(shape), dtype=dtype)
    with _lock:
        at = next((at for at in reversed(range(len(_free))) if _free[at].nbytes == size), None)  # the newest may be in a cache
        block = _free.pop(at) if at is not None else np.empty(size, dtype=np.uint8)  # numpy asks for huge pages, torch does not
    lent = block[:]  # this view dies with the tensor; the block lives on
    weakref.finalize(lent, _recycle, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(*shape)


def _recycle(block: np.ndarray) -> None:
    with _lock:
        _free.append(block)
        del _free[:-MOST_FREE]
