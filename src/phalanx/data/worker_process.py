"""A worker process of the loader: how it is started, what it sends, and how its death is reported.

    thread of the pool                                        worker process
    WorkerProcess(assignment), by the thread that trains ---> serve: one torch thread, seeds, worker_init_fn
    make(order): sends it ----------------------------------> reads, decodes, collates, transforms
                 waits                                        writes the tensors to a memfd
                 maps it: the tensors of the batch <--------- sends the rest, then the descriptor (parcel.py)

The process notes in a page that both have mapped which sample it reads: if it dies, its thread can say where. It ends when its
trainer does, however that ends.

Processes are forked by default, as in torch's DataLoader. Spawn and forkserver import the script again, which must then start
its work below `if __name__ == "__main__":`. What makes a fork safe:

- The thread that trains forks, between two steps. No torch operation is running in that thread.
- A child has one torch thread. A second one would wait for the parent's thread pool, which a fork leaves behind.
- A child uses no communicator and no GPU, and forgets the parent's signal handlers. Locks of ours are new in it.
- Forks of several threads do not mix: a child holds no end of another one's pipe that its parent has yet to close.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

import torch

from phalanx._torch_private import collate_in_own_memory, set_worker_info
from phalanx.data import parcel
from phalanx.data.assemble import SampleError
from phalanx.data.generators import seed_worker
from phalanx.data.image import BadSample

LOOK_UP = 1.0  # seconds between checks for the trainer's exit, while a thread waits for its process
LONGEST_START = 120.0  # seconds; a process that takes longer is stuck in a lock that another thread held during the fork
STARTING = -1  # in place of a sample number
HANDLED_BY_TRAINER = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # sent to a whole group; the trainer decides

_starting = threading.Lock()


class Stopped(BaseException):
    """The loader was closed, or the interpreter is leaving, while a micro-batch was in progress."""


class KilledWorkerError(SampleError):
    """A worker process was killed by a signal. Another one may succeed."""


class Task(Protocol):
    """The work of a worker: it answers an order, and names samples for error messages."""

    def __call__(self, order: Any, reading: Callable[[int], None], /) -> Any: ...

    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class Assignment:
    """The role of a worker process: number `worker` of `workers`, with its own seed."""

    task: Task
    dataset: Any  # for torch.utils.data.get_worker_info()
    worker: int
    workers: int
    seed: int
    init: Callable[[int], object] | None = None  # the user's worker_init_fn


class WorkerProcess:
    """One worker process as its thread sees it."""

    def __init__(self, assignment: Assignment, context: BaseContext) -> None:
        self.assignment = assignment
        forks = context.get_start_method() == "fork"
        with _starting, _signals_held_back() if forks else contextlib.nullcontext():
            self._connection, theirs = context.Pipe()
            self._process: Any = context.Process(  # type: ignore[attr-defined]  # BaseContext's types leave it out
                target=serve, args=(theirs, assignment), daemon=True, name="phalanx loader"
            )
            try:
                with warnings.catch_warnings():  # Python 3.12 warns of any fork of a process with threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self._process.start()
            except Exception as error:
                raise TypeError(
                    f"{context.get_start_method()} sends the data set and the functions to worker processes, but they "
                    f"cannot be pickled ({type(error).__name__}: {error}): define them at the top of a module, use "
                    "multiprocessing_context='fork', or kind='thread'"
                ) from error
            finally:
                theirs.close()  # so that our end closes when the process dies
        self._born = time.monotonic()
        self._now: mmap.mmap | None = None
        self._stuck = False
        self.alive = True

    def make(self, order: Any, go_on: Callable[[int], None]) -> Any:
        """Return the answer to `order`. EOFError or ConnectionError if the process died."""
        try:
            if self._now is None:
                self._await(go_on, self._born + LONGEST_START)
                self._now = parcel.mapped(recv_handle(self._connection), mmap.PAGESIZE)
            self._connection.send(order)
            self._await(go_on)
            reply = self._connection.recv()
            if isinstance(reply, parcel.Parcel):
                return parcel.received(reply, self._connection)
        except BaseException:
            self.alive = False  # the rest of the connection's data is useless
            raise
        raise reply.exception()

    def _await(self, go_on: Callable[[int], None], until: float | None = None) -> None:
        while not self._connection.poll(LOOK_UP):
            go_on(0)
            if until is not None and time.monotonic() > until:
                self._stuck = True
                self._process.kill()
            if not self._process.is_alive() and not self._connection.poll(0):
                raise EOFError  # dead, although a sibling still holds its end of the connection

    def cause_of_death(self) -> SampleError:
        """How the process died, and what it was reading."""
        self._process.join(10)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit code {code}"
        how = f"got stuck and {how}" if self._stuck else how
        index = STARTING if self._now is None else int.from_bytes(self._now[:8], "little", signed=True)
        kind = KilledWorkerError if code is not None and code < 0 else SampleError
        if index != STARTING:
            return kind(f"a worker process of the loader {how} while it was reading {self.assignment.task.name(index)}")
        hint = (
            "standard error has its last words; with spawn and forkserver a script begins its work below "
            "`if __name__ == '__main__':`"
        )
        return kind(f"a worker process of the loader {how} before its first sample: {hint}")

    def terminate(self) -> None:
        """Ask it to stop at once. It holds nothing that has to be restored."""
        if self._process.is_alive():
            self._process.terminate()

    def dismiss(self) -> None:
        """Tell an idle process to exit. Closing the connection is not enough: siblings hold copies of it."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.send(None)

    def end(self) -> None:
        """Wait until it has exited."""
        self._connection.close()
        for remedy in (self._process.terminate, self._process.kill):
            self._process.join(5)
            if self._process.is_alive():
                remedy()
        self._process.join(5)


@dataclass(frozen=True)
class _Failed:
    """The error of a failed batch. A traceback is not picklable, so its text is sent."""

    error: BadSample | SampleError
    worker: int
    trace: str

    def exception(self) -> Exception:
        self.error.__cause__ = RuntimeError(f"in worker process {self.worker} of the loader:\n{self.trace}")
        return self.error


def serve(connection: Connection, assignment: Assignment) -> None:
    """The main loop of a worker process."""
    torch.set_num_threads(1)  # there are as many workers as spare cores
    gc.freeze()  # never collect the parent's garbage: its finalizers would close the parent's resources
    _forget_signals()
    threading.Thread(target=_leave_with_the_trainer, daemon=True).start()
    seed_worker(assignment.seed)
    set_worker_info(assignment.worker, assignment.workers, assignment.seed, assignment.dataset)
    collate_in_own_memory()
    number = os.memfd_create("phalanx loader: now reading")
    os.ftruncate(number, mmap.PAGESIZE)
    now = mmap.mmap(number, mmap.PAGESIZE)

    def reading(index: int) -> None:
        now[:8] = index.to_bytes(8, "little", signed=True)

    reading(STARTING)
    send_handle(connection, number, None)
    os.close(number)
    failed = _begin(assignment)
    with contextlib.suppress(EOFError, OSError):  # the trainer closed the connection
        while (order := connection.recv()) is not None:
            if failed is not None:
                connection.send(failed)
            else:
                _answer(assignment, order, reading, connection)


def _answer(assignment: Assignment, order: Any, reading: Callable[[int], None], connection: Connection) -> None:
    try:
        packed = parcel.packed(assignment.task(order, reading))
    except Exception as error:  # noqa: BLE001  it is raised again where the user sees it
        connection.send(_failure(error, assignment.worker))
    else:
        packed.send(connection)


def _begin(assignment: Assignment) -> _Failed | None:
    """Call the user's worker_init_fn. If it raises, that is the answer to every order."""
    try:
        if assignment.init is not None:
            assignment.init(assignment.worker)
    except Exception as error:  # noqa: BLE001  it is raised again where the user sees it
        named = SampleError(f"worker_init_fn({assignment.worker}) failed: {type(error).__name__}: {error}")
        return _Failed(named, assignment.worker, traceback.format_exc())
    return None


def _failure(error: Exception, worker: int) -> _Failed:
    known = error if isinstance(error, BadSample | SampleError) else SampleError(f"{type(error).__name__}: {error}")
    return _Failed(known, worker, traceback.format_exc())


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block signals around a fork: a child must not run the trainer's handlers before it has reset them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*HANDLED_BY_TRAINER, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forget_signals() -> None:
    """Reset the signal handlers that a fork inherits from the trainer and its libraries."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED_BY_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*HANDLED_BY_TRAINER, signal.SIGTERM))


def _leave_with_the_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    assert trainer.pid is not None
    signs: list[Any] = [trainer.sentinel]  # a pipe whose other end siblings may also hold
    with contextlib.suppress(OSError):  # the process is gone, or the kernel is older than 5.3
        signs.append(os.pidfd_open(trainer.pid))
    wait(signs)
    os._exit(1)
