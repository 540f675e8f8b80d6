"""Make micro-batches ahead of time: in the calling thread, in threads, or in processes.

Threads are enough if the work is in C (decoding, tensor operations) and needs no interpreter lock. Processes are for data sets
written in Python. Each has a thread of the pool that waits for it (worker_process.py), so both kinds look the same from here.
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

from phalanx.data.assemble import Maker
from phalanx.data.scatter import Ranked
from phalanx.data.source import Encoded
from phalanx.data.worker_process import LOOK_UP, KilledWorkerError, Stopped, Task, WorkerProcess

Kind = Literal["thread", "process"]

RESTARTS = 2  # per micro-batch: a sample that kills every process is itself the cause
MOST_WORKERS = 8  # by default: more threads would queue for the interpreter lock


def default_workers(maker: Maker, comm: Ranked, kind: Kind, stream: bool) -> int:
    """The host's spare cores, divided among its ranks: at least one, at most MOST_WORKERS.

    One for data in memory, and for a process that reads a stream. None for a user's data set, unless in processes: it may draw
    from generators that threads share, and need not be thread-safe.
    """
    if maker.takes_at_once:
        return 1
    if kind == "thread" and not isinstance(maker.source, Encoded):
        return 0
    if stream:
        return 1
    ranks_here = getattr(comm, "intra_size", 1)
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks_here - 1))


class Future(Protocol):
    """A pending answer: a micro-batch or a step, with a method `pinned`."""

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Pool(Protocol):
    """Answers orders. Results are requested in the order of submission."""

    def submit(self, order: Any) -> Future: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CallerThread:
    """No worker: the calling thread does the work when it requests the result."""

    task: Task
    pin: bool

    def submit(self, order: Any) -> Future:
        return _Later(lambda: _finished(self.task(order, lambda index: None), self.pin))

    def close(self) -> None:
        pass


class Workers:
    """Threads that do `work`. They end when the pool is closed or dropped, and before the interpreter exits.

    They are daemons, because the interpreter waits for other threads without telling them that it is exiting. But it does run
    finalizers, and ours waits for the sample that is being read.
    """

    def __init__(self, work: LocalWork | RemoteWork, count: int) -> None:
        self._work = work
        self._ordered: queue.SimpleQueue[tuple[Any, concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_do, args=(work, self._ordered), name=f"phalanx loader {i}", daemon=True)
            for i in range(count)
        ]
        self._finalizer = weakref.finalize(self, _end, os.getpid(), work, self._ordered, threads)
        for thread in threads:
            thread.start()

    def submit(self, order: Any) -> Future:
        """Returns a future, which raises the worker's exception."""
        if isinstance(self._work, RemoteWork):
            return _Restarted(self._work, lambda: self._put(order))
        return self._put(order)

    def close(self) -> None:
        """Wait until all threads and processes have ended. The sample being read is finished, the rest is dropped."""
        self._finalizer()

    def _put(self, order: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._ordered.put((order, future))
        return future


class LocalWork:
    """Carries out an order in the thread itself."""

    def __init__(self, task: Task | None, *, pin: bool) -> None:
        self._task, self._pin = task, pin
        # the current GPU is per thread: pinning in a new thread would open a context on GPU 0
        self._gpu = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        self._stopped = threading.Event()

    def enter_thread(self) -> None:
        """Called first in every thread of the pool."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def __call__(self, order: Any) -> Any:
        return _finished(self._make(order), self._pin)

    def stop(self) -> None:
        """Start nothing new."""
        self._stopped.set()

    def end(self) -> None:
        """Called when all threads have stopped."""

    def _make(self, order: Any) -> Any:
        assert self._task is not None
        return self._task(order, self._go_on)

    def _go_on(self, index: int = 0) -> None:
        if self._stopped.is_set():
            raise Stopped


class RemoteWork(LocalWork):
    """Carries out an order in a process. `start(number)` starts one in the calling thread: our threads never fork."""

    def __init__(self, start: Callable[[int], WorkerProcess], count: int, *, pin: bool) -> None:
        super().__init__(None, pin=pin)
        self._start = start
        self._lock = threading.Lock()
        self._busy: set[WorkerProcess] = set()
        self._gone: list[int] = []  # numbers of processes that died
        self._idle: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()
        for number in range(count):
            self._idle.put(start(number))
        self._count = count

    def replace_the_dead(self) -> None:
        """Replace each process that died. Called by the training thread."""
        while self._gone:
            self._idle.put(self._start(self._gone.pop()))

    def stop(self) -> None:
        """Start nothing new, and abandon running orders."""
        super().stop()
        with self._lock:
            for process in self._busy:
                process.terminate()
        for _ in range(self._count):
            self._idle.put(None)  # for threads that wait for a process

    def end(self) -> None:
        """Return when no process is left."""
        idle = []
        while not self._idle.empty():
            if (process := self._idle.get()) is not None:
                process.dismiss()
                idle.append(process)
        for process in idle:
            process.end()

    def _make(self, order: Any) -> Any:
        self._go_on()
        process = self._idle.get()
        if process is None:
            raise Stopped
        with self._lock:
            self._busy.add(process)
        try:
            return process.make(order, self._go_on)
        except (EOFError, ConnectionError):
            self._go_on()  # raises if it died because the loader was closed
            raise process.cause_of_death() from None
        finally:
            with self._lock:
                self._busy.discard(process)
            if process.alive:
                self._idle.put(process)
            else:
                process.terminate()
                process.end()
                self._gone.append(process.assignment.worker)


class _Restarted:
    """A process's answer. If the process is killed, another one starts and answers the same order.

    A micro-batch does not depend on the worker that makes it, so nothing is lost, duplicated or reordered.
    """

    def __init__(self, work: RemoteWork, put: Callable[[], concurrent.futures.Future[Any]]) -> None:
        self._work, self._put = work, put
        self._work.replace_the_dead()
        self._future = put()

    def result(self) -> Any:
        for _ in range(RESTARTS):
            try:
                return self._awaited()
            except KilledWorkerError as error:  # noqa: PERF203  by the kernel, for want of memory, or by a person
                warnings.warn(f"{error}; the loader starts another one", RuntimeWarning, stacklevel=2)
                self._future = self._put()
        return self._awaited()

    def cancel(self) -> Any:
        return self._future.cancel()

    def _awaited(self) -> Any:
        self._work.replace_the_dead()
        while not (self._future.done() or concurrent.futures.wait([self._future], LOOK_UP).done):
            self._work.replace_the_dead()  # a dead process answers for itself, but this order may need a replacement
        return self._future.result()


@dataclass(frozen=True)
class _Later:
    make: Callable[[], Any]

    def result(self) -> Any:
        return self.make()

    def cancel(self) -> None:
        pass


def _do(work: LocalWork, ordered: queue.SimpleQueue[tuple[Any, concurrent.futures.Future[Any]] | None]) -> None:
    """The main loop of a thread. It references the work, not the pool, so that a dropped pool can be collected."""
    work.enter_thread()
    while (order := ordered.get()) is not None:
        wanted, future = order
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(wanted))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
                future.set_exception(error)
        del order, future  # do not keep the batch alive


def _end(owner: int, work: LocalWork, ordered: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    if os.getpid() != owner:  # in a fork, which has neither these threads nor these children
        return
    work.stop()
    for _ in threads:
        ordered.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the thread that drops the last reference runs this
            thread.join()
    work.end()


def _finished(made: Any, pin: bool) -> Any:
    return made.pinned() if pin else made
