"""What makes micro-batches ahead of time: nothing, threads, or processes.

Threads are enough where the work is in C (decoding, tensor operations) and needs no interpreter lock. Processes are for data sets
written in Python; each has a thread of the pool that waits for it (worker_process.py), so both kinds look alike from here.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from phalanx.data.assemble import Made, Maker, map_tensors
from phalanx.data.route import MicroBatch
from phalanx.data.scatter import Ranked
from phalanx.data.source import Encoded
from phalanx.data.worker_process import KilledWorkerError, Stopped, WorkerProcess

Kind = Literal["thread", "process"]

RESTARTS = 2  # that a micro-batch is worth: a sample that kills every process is the reason itself
MOST_WORKERS = 8  # by default: beyond it threads queue for the interpreter lock


def default_workers(maker: Maker, comm: Ranked, kind: Kind) -> int:
    """The cores of this host that the ranks on it leave free, shared among them; at least one, at most MOST_WORKERS.

    One for data in memory. None for data sets of the user's, unless in processes: they may draw from generators that threads
    share, and need not stand several threads.
    """
    if maker.takes_at_once:
        return 1
    if kind == "thread" and not isinstance(maker.source, Encoded):
        return 0
    ranks_here = getattr(comm, "intra_size", 1)
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks_here - 1))


class Future(Protocol):
    """A micro-batch that may not be there yet."""

    def result(self) -> Made: ...

    def cancel(self) -> Any: ...


class Pool(Protocol):
    """Something that makes micro-batches; results are asked for in the order of submission."""

    def submit(self, wanted: MicroBatch) -> Future: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CallerThread:
    """No worker: the calling thread makes a micro-batch when it asks for the result."""

    maker: Maker
    pin: bool

    def submit(self, wanted: MicroBatch) -> Future:
        return _Later(lambda: _finished(self.maker(wanted), self.pin))

    def close(self) -> None:
        pass


class Workers:
    """Threads that do `work`. They end when the pool is closed or forgotten, and before the interpreter does.

    They are daemons, because the interpreter waits for others without telling them that it is leaving; but it does run
    finalizers, and ours waits for the sample that is being read.
    """

    def __init__(self, work: LocalWork | RemoteWork, count: int) -> None:
        self._ordered: queue.SimpleQueue[tuple[MicroBatch, concurrent.futures.Future[Made]] | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_do, args=(work, self._ordered), name=f"phalanx loader {i}", daemon=True)
            for i in range(count)
        ]
        self._finalizer = weakref.finalize(self, _end, work, self._ordered, threads)
        for thread in threads:
            thread.start()

    def submit(self, wanted: MicroBatch) -> Future:
        """A future; its exception is the worker's."""
        future: concurrent.futures.Future[Made] = concurrent.futures.Future()
        self._ordered.put((wanted, future))
        return future

    def close(self) -> None:
        """Return when no thread and no process is left; what is being read is finished, the rest is not begun."""
        self._finalizer()


class LocalWork:
    """A micro-batch made by the thread itself."""

    def __init__(self, maker: Maker, *, pin: bool) -> None:
        self._maker, self._pin = maker, pin
        # the current GPU is one of a thread's properties: pinning in a new thread would open a context on GPU 0
        self._gpu = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        self._stopped = threading.Event()

    def enter_thread(self) -> None:
        """Called first in every thread that does this work."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def __call__(self, wanted: MicroBatch) -> Made:
        return _finished(self._make(wanted), self._pin)

    def stop(self) -> None:
        """Let nothing new begin."""
        self._stopped.set()

    def end(self) -> None:
        """Called when all threads have stopped."""

    def _make(self, wanted: MicroBatch) -> Made:
        return self._maker(wanted, self._go_on)

    def _go_on(self, index: int = 0) -> None:
        if self._stopped.is_set():
            raise Stopped


class RemoteWork(LocalWork):
    """A micro-batch made by a process. It starts with its first one; if it is killed, another one starts and makes the same.

    What a micro-batch holds does not depend on the worker that makes it, so that nothing is lost, doubled or reordered.
    """

    def __init__(self, maker: Maker, *, pin: bool) -> None:
        super().__init__(maker, pin=pin)
        self._lock = threading.Lock()
        self._busy: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []

    def stop(self) -> None:
        """Let nothing new begin, and what has begun not end."""
        super().stop()
        with self._lock:
            for process in self._busy:
                process.terminate()

    def end(self) -> None:
        """Return when no process is left."""
        while self._idle:
            self._idle.pop().end()

    def _make(self, wanted: MicroBatch) -> Made:
        for _ in range(RESTARTS):
            try:
                return self._try(wanted)
            except KilledWorkerError as error:  # noqa: PERF203  by the kernel, for want of memory, or by a person
                warnings.warn(f"{error}; the loader starts another one", RuntimeWarning, stacklevel=2)
        return self._try(wanted)

    def _try(self, wanted: MicroBatch) -> Made:
        self._go_on()
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = WorkerProcess(self._maker)
        with self._lock:
            self._busy.add(process)
        try:
            return process.make(wanted, self._go_on)
        except (EOFError, ConnectionError):
            self._go_on()  # it died because the loader was closed
            raise process.cause_of_death(self._maker) from None
        finally:
            with self._lock:
                self._busy.discard(process)
                if process.alive:
                    self._idle.append(process)
            if not process.alive:
                process.terminate()
                process.end()


@dataclass(frozen=True)
class _Later:
    make: Callable[[], Made]

    def result(self) -> Made:
        return self.make()

    def cancel(self) -> None:
        pass


def _do(work: LocalWork, ordered: queue.SimpleQueue[tuple[MicroBatch, concurrent.futures.Future[Made]] | None]) -> None:
    """The main loop of a thread. It knows the work, not the pool, so that a dropped pool can end."""
    work.enter_thread()
    while (order := ordered.get()) is not None:
        wanted, future = order
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(wanted))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
                future.set_exception(error)
        del order, future  # a batch lives no longer than its user wants


def _end(work: LocalWork, ordered: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    work.stop()
    for _ in threads:
        ordered.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the thread that drops the last reference runs this
            thread.join()
    work.end()


def _finished(made: Made, pin: bool) -> Made:
    return Made(map_tensors(torch.Tensor.pin_memory, made.data), made.samples, made.skipped) if pin else made
