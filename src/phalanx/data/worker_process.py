"""A worker process of the loader: how it is started, what it sends, and how its death is reported.

Processes are spawned, never forked: a fork of a process in which torch has run hangs in its first parallel operation.

    thread of the pool                                        worker process
    WorkerProcess(maker) -----------------------------------> serve: imports torch, unpickles the maker
    make(wanted): sends it ---------------------------------> reads, decodes, transforms
                  waits                                       writes the tensors to a memfd
                  maps it: the tensors of the batch <-------- sends shapes, then the descriptor

A memfd has no name, so nothing stays behind in /dev/shm, whatever is killed. The process notes in a page that both have
mapped which sample it reads: if it dies, its thread can say where. It ends when its trainer does.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from phalanx.data.assemble import Made, Maker, SampleError, map_tensors
from phalanx.data.image import BadSample
from phalanx.data.route import MicroBatch

LOOK_UP = 1.0  # seconds after which a thread that waits for its process looks whether the trainer is leaving
ALIGNED = 64  # bytes: each tensor of a batch begins on a cache line
STARTING = -1  # instead of the number of a sample


class Stopped(BaseException):
    """The loader was closed, or the interpreter is leaving, while a micro-batch was being made."""


class KilledWorkerError(SampleError):
    """A worker process was killed by a signal: another one may succeed."""


class WorkerProcess:
    """One worker process as its thread sees it."""

    def __init__(self, maker: Maker) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(theirs, maker), daemon=True, name="phalanx loader")
        try:
            self._process.start()
        except Exception as error:
            raise TypeError(
                "kind='process' sends source, decode and transform to other processes, but they cannot be pickled "
                f"({type(error).__name__}: {error}): define them at the top of a module, or use kind='thread'"
            ) from error
        finally:
            theirs.close()  # so that ours ends when the process does
        self._now: mmap.mmap | None = None
        self.alive = True

    def make(self, wanted: MicroBatch, go_on: Callable[[int], None]) -> Made:
        """The micro-batch `wanted`; EOFError or ConnectionError if the process died."""
        try:
            if self._now is None:
                self._await(go_on)
                self._now = _map(recv_handle(self._connection), mmap.PAGESIZE)
            self._connection.send(wanted)
            self._await(go_on)
            reply = self._connection.recv()
            if isinstance(reply, _Reply):
                return Made(_received(reply, self._connection), reply.samples, reply.skipped)
        except BaseException:
            self.alive = False  # what is left in the connection is of no use
            raise
        raise reply.exception()

    def _await(self, go_on: Callable[[int], None]) -> None:
        while not self._connection.poll(LOOK_UP):
            go_on(0)

    def cause_of_death(self, maker: Maker) -> SampleError:
        """How the process died, and what it was reading."""
        self._process.join(10)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit code {code}"
        index = STARTING if self._now is None else int.from_bytes(self._now[:8], "little", signed=True)
        kind = KilledWorkerError if code is not None and code < 0 else SampleError
        if index != STARTING:
            return kind(f"a worker process of the loader {how} while it was reading {maker.name(index)}")
        hint = "standard error has its last words; a script that starts processes begins with `if __name__ == '__main__':`"
        return kind(f"a worker process of the loader {how} before its first sample: {hint}")

    def terminate(self) -> None:
        """Ask it to go, whatever it is doing. It holds nothing that must be put back."""
        if self._process.is_alive():
            self._process.terminate()

    def end(self) -> None:
        """Return when it is gone. An idle process goes by itself when its connection is closed."""
        self._connection.close()
        for remedy in (self._process.terminate, self._process.kill):
            self._process.join(5)
            if self._process.is_alive():
                remedy()
        self._process.join(5)


@dataclass(frozen=True)
class _Slot:
    """A tensor of a batch: where it lies in the memfd."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return -(-self.dtype.itemsize * math.prod(self.shape) // ALIGNED) * ALIGNED

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.bytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Reply:
    data: Any  # the batch, with a _Slot for each tensor
    size: int  # of the memfd that follows; 0: none follows
    samples: int
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Failed:
    """An exception on its way to the training thread. Your exception class may not be picklable, so its text travels."""

    error: BadSample | SampleError
    trace: str

    def exception(self) -> Exception:
        self.error.__cause__ = RuntimeError(f"in a worker process of the loader:\n{self.trace}")
        return self.error


def serve(connection: Connection, maker: Maker) -> None:
    """The main loop of a worker process."""
    torch.set_num_threads(1)  # there are as many workers as there are cores to spare
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the trainer decides
    threading.Thread(target=_leave_with_the_trainer, daemon=True).start()
    number = os.memfd_create("phalanx loader: now reading")
    os.ftruncate(number, mmap.PAGESIZE)
    now = mmap.mmap(number, mmap.PAGESIZE)

    def reading(index: int) -> None:
        now[:8] = index.to_bytes(8, "little", signed=True)

    reading(STARTING)
    send_handle(connection, number, None)
    os.close(number)
    while True:
        try:
            wanted = connection.recv()
        except (EOFError, OSError):
            return
        try:
            made = maker(wanted, reading)
        except Exception as error:  # noqa: BLE001  it is raised again where the user sees it
            connection.send(_failed(error))
        else:
            _send(made, connection)


def _leave_with_the_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    os._exit(1)


def _failed(error: Exception) -> _Failed:
    known = error if isinstance(error, BadSample | SampleError) else SampleError(f"{type(error).__name__}: {error}")
    return _Failed(known, traceback.format_exc())


def _send(made: Made, connection: Connection) -> None:
    tensors: list[Tensor] = []
    slots: list[_Slot] = []

    def slot(x: Tensor) -> _Slot:
        x = x.detach().cpu()
        x = x if _is_dense(x) else x.contiguous()
        offset = slots[-1].offset + slots[-1].bytes if slots else 0
        tensors.append(x)
        slots.append(_Slot(x.dtype, tuple(x.shape), x.stride(), offset))
        return slots[-1]

    data = map_tensors(slot, made.data)
    size = slots[-1].offset + slots[-1].bytes if slots else 0
    if size:
        number = os.memfd_create("phalanx loader: batch")
        os.ftruncate(number, size)
        flat = torch.frombuffer(mmap.mmap(number, size), dtype=torch.uint8)
        for x, place in zip(tensors, slots):
            place.view(flat).copy_(x)
    connection.send(_Reply(data, size, made.samples, made.skipped))
    if size:
        send_handle(connection, number, None)
        os.close(number)


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order: then the layout travels along (channels last)."""
    order = sorted(range(x.dim()), key=lambda d: x.stride(d), reverse=True)
    return x.permute(order).is_contiguous()


def _received(reply: _Reply, connection: Connection) -> Any:
    memory = _map(recv_handle(connection), reply.size) if reply.size else bytearray(1)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return map_tensors(lambda slot: slot.view(flat), reply.data, _Slot)


def _map(number: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(number, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(number)
