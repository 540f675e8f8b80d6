"""Memory that all processes of a host read, and of which each gets a page of its own as soon as it writes there.

Two views of one file without a name. What is written through `common` everybody sees, in both views. `own` is mapped privately:
reading it shows the file, writing to it makes the kernel copy the page first, so that nobody else sees what was written, and
from then on this process no longer sees what others write there. `written` tells whether that has happened.

    memory = HostMemory.create(1 << 20)                 # in one process
    memory = HostMemory.open(memory.path, 1 << 20)      # in the others, while the first one keeps it
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

PAGE = mmap.PAGESIZE
# /proc/self/pagemap, one 64-bit word per page (Documentation/admin-guide/mm/pagemap.rst)
PAGEMAP = "/proc/self/pagemap"
SWAPPED, OF_A_FILE = 1 << 62, 1 << 61  # and bit 63, the sign: present

_forks = 0


def _count_fork() -> None:
    global _forks  # a property of the process
    _forks += 1


os.register_at_fork(before=_count_fork)


class HostMemory:
    """`nbytes` and a page to try it on. Whoever has a tensor of it keeps it; it is gone with the last one, on any process."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._nbytes = -(-nbytes // PAGE) * PAGE
        whole = self._nbytes + PAGE
        self._common = mmap.mmap(fd, whole, mmap.MAP_SHARED)
        self._own = mmap.mmap(fd, whole, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._pagemap = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self._fd = -1
        self._first = self.own(0, (1,), (1,), torch.uint8).data_ptr() // PAGE
        self._forks = _forks

    def __del__(self) -> None:
        for fd in (getattr(self, "_pagemap", -1), getattr(self, "_fd", -1)):
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def create(nbytes: int) -> HostMemory:
        """OSError where the system does not give it."""
        fd = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        try:
            # now, rather than SIGBUS when a page is touched for which there is no memory
            os.posix_fallocate(fd, 0, (-(-nbytes // PAGE) + 1) * PAGE)
            memory = HostMemory(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        memory._fd = fd
        return memory

    @staticmethod
    def open(path: str, nbytes: int) -> HostMemory:
        """OSError where it is not there, or not for us."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return HostMemory(fd, nbytes)
        finally:
            os.close(fd)

    @property
    def path(self) -> str:
        """By which other processes of this user find what `create` returned."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def forget_path(self) -> None:
        """All have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def own(self, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own, so that saving it saves nothing else; whoever writes to it writes for himself."""
        return _tensor(self._own, offset, shape, strides, dtype)

    def common(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor; whoever writes to it writes for everybody who has not written there through `own`."""
        return _tensor(self._common, offset, (count,), (1,), dtype)

    def written(self) -> bool:
        """Whether this process has pages of its own."""
        return self._written(0, self._nbytes)

    def forked(self) -> bool:
        """Whether this process has children by fork: they go on seeing what is written through `common`."""
        return self._forks != _forks

    def _written(self, start: int, nbytes: int) -> bool:
        size = nbytes // PAGE * 8
        told = os.pread(self._pagemap, size, (self._first + start // PAGE) * 8)
        if len(told) != size:
            return True
        pages = torch.frombuffer(bytearray(told), dtype=torch.int64)
        return bool((((pages < 0) | (pages & SWAPPED != 0)) & (pages & OF_A_FILE == 0)).any())

    def objection(self, rank: int) -> str:
        """What this system does otherwise than it should, found by trying, each rank on a word of its own; empty if nothing."""
        at = self._nbytes + rank * 8 % PAGE
        own, common = self.own(at, (1,), (1,), torch.int64), self.common(at, 1, torch.int64)
        before = int(own)
        common += 1
        if int(own) != before + 1 or self._written(self._nbytes, PAGE):
            return "a private mapping does not follow its file"
        own += 1
        if int(common) != before + 1 or not self._written(self._nbytes, PAGE) or self.written():
            return f"a write to a private mapping is not seen in {PAGEMAP}"
        return ""


def _tensor(memory: mmap.mmap, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=offset)
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)  # no view of `flat`, which would stay
