"""Copies of tensors in host memory, to write to disk while training changes the originals."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.train.checkpoint.tree import Tensors, dense_stride


class HostCopies:
    """Copies of tensors in host memory, pinned for GPU tensors. The memory is reused, because fresh pages are slower."""

    def __init__(self) -> None:
        self._room: Tensors = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copy `tensors`. The copies are valid until the next call. Memory of other tensors is freed."""
        room: Tensors = {}
        for name, x in tensors.items():
            copy = self._room.get(name)
            if copy is None or (copy.shape, copy.dtype, dense_stride(copy)) != (x.shape, x.dtype, dense_stride(x)):
                copy = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
            room[name] = copy.copy_(x, non_blocking=True)
        for device in {x.device for x in tensors.values() if x.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # not the whole device: other streams may be waiting for other ranks
        self._room = room
        return dict(room)
