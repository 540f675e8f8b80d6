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

from phalanx.data.assemble import Maker
from phalanx.data.scatter import Ranked
from phalanx.data.source import Encoded
from phalanx.data.worker_process import LOOK_UP, KilledWorkerError, Stopped, Task, WorkerProcess

Kind = Literal["thread", "process"]

RESTARTS = 2  # that a micro-batch is worth: a sample that kills every process is the reason itself
MOST_WORKERS = 8  # by default: beyond it threads queue for the interpreter lock


def default_workers(maker: Maker, comm: Ranked, kind: Kind, stream: bool) -> int:
    """The cores of this host that the ranks on it leave free, shared among them; at least one, at most MOST_WORKERS.

    One for data in memory, and for a process that reads a stream. None for data sets of the user's, unless in processes: they
    may draw from generators that threads share, and need not stand several threads.
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
    """An answer that may not be there yet: a micro-batch or a step, with a method `pinned`."""

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Pool(Protocol):
    """Something that answers orders; results are asked for in the order of submission."""

    def submit(self, order: Any) -> Future: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CallerThread:
    """No worker: the calling thread does the work when it asks for the result."""

    task: Task
    pin: bool

    def submit(self, order: Any) -> Future:
        return _Later(lambda: _finished(self.task(order, lambda index: None), self.pin))

    def close(self) -> None:
        pass


class Workers:
    """Threads that do `work`. They end when the pool is closed or forgotten, and before the interpreter does.

    They are daemons, because the interpreter waits for others without telling them that it is leaving; but it does run
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
        """A future; its exception is the worker's."""
        if isinstance(self._work, RemoteWork):
            return _Restarted(self._work, lambda: self._put(order))
        return self._put(order)

    def close(self) -> None:
        """Return when no thread and no process is left; what is being read is finished, the rest is not begun."""
        self._finalizer()

    def _put(self, order: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._ordered.put((order, future))
        return future


class LocalWork:
    """An order carried out by the thread itself."""

    def __init__(self, task: Task | None, *, pin: bool) -> None:
        self._task, self._pin = task, pin
        # the current GPU is one of a thread's properties: pinning in a new thread would open a context on GPU 0
        self._gpu = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        self._stopped = threading.Event()

    def enter_thread(self) -> None:
        """Called first in every thread that does this work."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def __call__(self, order: Any) -> Any:
        return _finished(self._make(order), self._pin)

    def stop(self) -> None:
        """Let nothing new begin."""
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
    """An order carried out by a process. `start(number)` starts one, here and now: threads of ours never fork."""

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
        """Start another process for each that died. The thread that trains calls this."""
        while self._gone:
            self._idle.put(self._start(self._gone.pop()))

    def stop(self) -> None:
        """Let nothing new begin, and what has begun not end."""
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
            self._go_on()  # it died because the loader was closed
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
    """The answer of a process. If it is killed, another one starts and answers the same order.

    What a micro-batch holds does not depend on the worker that makes it, so that nothing is lost, doubled or reordered.
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
            self._work.replace_the_dead()  # whatever died has an answer of its own, but this order may need its process
        return self._future.result()


@dataclass(frozen=True)
class _Later:
    make: Callable[[], Any]

    def result(self) -> Any:
        return self.make()

    def cancel(self) -> None:
        pass


def _do(work: LocalWork, ordered: queue.SimpleQueue[tuple[Any, concurrent.futures.Future[Any]] | None]) -> None:
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


def _end(owner: int, work: LocalWork, ordered: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    if os.getpid() != owner:  # a fork of it, which has neither these threads nor these children
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
