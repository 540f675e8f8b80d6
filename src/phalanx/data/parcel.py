"""Send a batch from a worker process: its tensors in anonymous memory, the rest as a pickle.

A memfd has no name, so nothing stays behind in /dev/shm if a process is killed. The batch may be any object that can be pickled:
each dense tensor anywhere in it is replaced by a number.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle  # noqa: TID251  between a trainer and its own children, as multiprocessing does; nothing of it is from a network
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64  # bytes: each tensor of a batch begins on a cache line


@dataclass(frozen=True)
class Slot:
    """Where a tensor of a batch lies in the memfd."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + -(-self.dtype.itemsize * math.prod(self.shape) // ALIGNED) * ALIGNED

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.end].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Parcel:
    """A pickled object without its tensors, whose memory follows."""

    pickled: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes of the memfd that follows; 0 if none does."""
        return self.slots[-1].end if self.slots else 0


class _Packer(ForkingPickler):
    """A pickler that replaces tensors by numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.slots: list[Slot] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.slots)
            x = obj.detach().cpu()
            x = x if _is_dense(x) else x.contiguous()
            self.slots.append(Slot(x.dtype, tuple(x.shape), x.stride(), self.slots[-1].end if self.slots else 0))
            self.tensors.append(x)
        return self._numbers[id(obj)]


class _Unpacker(pickle.Unpickler):
    """An unpickler that restores the tensors."""

    def __init__(self, parcel: Parcel, flat: Tensor) -> None:
        super().__init__(io.BytesIO(parcel.pickled))
        self._slots, self._flat = parcel.slots, flat
        self._views: dict[int, Tensor] = {}

    def persistent_load(self, pid: int) -> Tensor:
        if pid not in self._views:
            self._views[pid] = self._slots[pid].view(self._flat)
        return self._views[pid]


@dataclass(frozen=True)
class Packed:
    """A parcel that is ready to send, with the descriptor of its memory."""

    parcel: Parcel
    memory: int | None

    def send(self, connection: Connection) -> None:
        """Send it, once."""
        try:
            connection.send(self.parcel)
            if self.memory is not None:
                send_handle(connection, self.memory, None)
        finally:
            if self.memory is not None:
                os.close(self.memory)


def packed(content: Any) -> Packed:
    """Make a parcel of an object. Raises if it cannot be pickled, or there is no memory."""
    file = io.BytesIO()
    packer = _Packer(file)
    try:
        packer.dump(content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"the batch cannot be sent from a worker process: {error}") from error
    parcel = Parcel(file.getvalue(), tuple(packer.slots))
    if not parcel.size:
        return Packed(parcel, None)
    number = os.memfd_create("phalanx loader: batch")
    try:
        os.ftruncate(number, parcel.size)
        flat = torch.frombuffer(mmap.mmap(number, parcel.size), dtype=torch.uint8)
        for x, slot in zip(packer.tensors, parcel.slots):
            slot.view(flat).copy_(x)
    except BaseException:
        os.close(number)
        raise
    return Packed(parcel, number)


def received(parcel: Parcel, connection: Connection) -> Any:
    """Unpack a parcel. The tensors are views of the memory that the worker filled."""
    memory = mapped(recv_handle(connection), parcel.size) if parcel.size else bytearray(1)
    return _Unpacker(parcel, torch.frombuffer(memory, dtype=torch.uint8)).load()


def mapped(number: int, size: int) -> mmap.mmap:
    """Map the memory of a descriptor, and close the descriptor."""
    try:
        return mmap.mmap(number, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(number)


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill a piece of memory in any order, so that its layout (channels last) can be kept."""
    order = sorted(range(x.dim()), key=lambda d: x.stride(d), reverse=True)
    return x.permute(order).is_contiguous()
