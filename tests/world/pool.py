"""Worker processes that stay between tests: `Pool(n).run(fn, *args)` calls `fn(comm, *args)` on n ranks of one world.

To start a rank is to import torch, 2 to 3 s of CPU. So a fork server imports it once, while it has one thread and has run no
parallel operation (a child forked later would hang in its first one), and all ranks of all worlds are forked from it.

    pytest                     fork server                      rank r of a pool
    Pool.run(fn, *args) ------ imports torch, forks ----------> comm = create_communicator()
      pickled (fn, args) -------------------------------------> fn(comm, *args)
      results in rank order <---------------------------------- pickled result, or the traceback as text

A rank ends when its connection to pytest breaks, whatever pytest died of and whatever the rank was doing; the fork server ends
with its last rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

DEADLINE = 30.0  # seconds of one `run`
START_DEADLINE = 60.0  # seconds until all ranks of a new pool have met
TIMEOUT = 20.0  # of the communicator: its own diagnosis of a hang comes before the deadline
GRACE = 2.0  # seconds that the other ranks get after one has failed: they may be waiting for it
SHOWN = 20_000  # characters of a rank's output in a failure

PRELOAD = ["pytest", "torch", "torch.distributed", "phalanx.comm.create", "phalanx.comm.transports.torch", "phalanx.schedule"]


class WorldError(AssertionError):
    """A rank raised, died or did not answer in time; the message has tracebacks, or all stacks of all ranks."""


@dataclass(frozen=True)
class Worker:
    """One rank as pytest sees it."""

    process: BaseProcess
    connection: Connection
    log: IO[bytes]

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-SHOWN:]


class Pool:
    """A world of `size` ranks, started at its first `run` and again after a failed one."""

    def __init__(self, size: int, *, env: dict[str, str] | None = None) -> None:
        self.size = size
        self._env = dict(env or {})
        self._workers: list[Worker] = []

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, in rank order; empty before the first run and after a failed one."""
        return [worker.process.pid for worker in self._workers if worker.process.pid]

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
        """The results of `fn(comm, *args)`, a function of a module, in rank order."""
        __tracebackhide__ = True  # the story is in the message
        try:
            if not self._workers:
                self._start()
            job = pickle.dumps((fn, args))
            for worker in self._workers:
                worker.connection.send_bytes(job)
            return self._collect(f"{fn.__module__}.{fn.__qualname__} on {self.size} ranks", deadline)
        except BaseException:  # also ctrl-C: the ranks are in the middle of something, and no use to the next test
            self.kill()
            raise

    def kill(self) -> None:
        """End all ranks, by process id, and forget them. Idempotent."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(10)
            worker.connection.close()
            worker.log.close()
        self._workers = []

    def _start(self) -> None:
        for attempt in itertools.count(1):
            self._fork()
            try:
                self._collect(f"the start of {self.size} ranks", START_DEADLINE)
            except WorldError as error:
                # between the moment we find a free port and the moment rank 0 takes it anybody may
                if attempt == 3 or "EADDRINUSE" not in str(error):
                    raise
                self.kill()
            else:
                return

    def _fork(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server inherits it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = _free_port()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            env = {
                **self._env,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the rank; has no name: nothing to clean up
            path = f"/proc/{os.getpid()}/fd/{log.fileno()}"
            process = context.Process(target=_serve, args=(theirs, path, env), name=f"rank {rank} of {self.size}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, mine, log))

    def _collect(self, what: str, deadline: float) -> list[Any]:
        """One answer per rank."""
        __tracebackhide__ = True
        begun = time.monotonic()
        end = begun + deadline
        rank_of = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while rank_of:
            ready = wait(list(rank_of), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = rank_of.pop(connection)  # type: ignore[arg-type,call-overload]
                try:
                    well, answer = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    well, answer = False, self._obituary(rank)
                (results if well else errors)[rank] = answer
                if not well:
                    end = min(end, time.monotonic() + GRACE)
        if not errors and not rank_of:
            return [results[rank] for rank in range(self.size)]
        late = sorted(rank_of.values())
        words = [f"rank {rank} of {self.size}:\n{text}" for rank, text in errors.items()]  # in the order of failure
        if late and errors:
            words.append(f"rank(s) {', '.join(map(str, late))} were still at it {GRACE:g} s later")
        elif late:
            spent = time.monotonic() - begun
            words.append(f"rank(s) {', '.join(map(str, late))} did not finish; all stacks after {spent:.1f} s:")
            words.extend(f"---- rank {rank} of {self.size}\n{text}" for rank, text in enumerate(self._stacks()))
        raise WorldError(f"{what}\n" + "\n".join(words))

    def _obituary(self, rank: int) -> str:
        worker = self._workers[rank]
        worker.process.join(5)
        return f"its process ended with exit code {worker.process.exitcode}; its last words:\n{worker.output()}"

    def _stacks(self) -> Sequence[str]:
        """What every rank wrote, ending with the stacks of all its threads."""
        for worker in self._workers:
            if worker.process.is_alive() and worker.process.pid:
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return [worker.output() for worker in self._workers]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- in the rank ------------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, log: str, env: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for pytest, which ends us
    voice = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(voice, 1)
    os.dup2(voice, 2)
    faulthandler.register(signal.SIGUSR1, file=voice, all_threads=True)
    faulthandler.enable(file=voice)
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")):  # of a launcher under which pytest itself may run
            del os.environ[name]
    # torch's store asks the DNS for the name of everyone who connects, and a server that does not answer costs 5 s each time
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.update(env)
    warnings.simplefilter("error")  # torch announces removals with warnings

    def answer(work: Callable[[], Any]) -> None:
        try:
            message = pickle.dumps((True, work()))
        except BaseException as error:  # noqa: BLE001  the test fails with it
            message = pickle.dumps((False, _story(error)))
        connection.send_bytes(message)

    world: list[Any] = []

    def create() -> None:
        import torch

        import phalanx

        torch.set_num_threads(1)
        world.append(phalanx.create_communicator(timeout=TIMEOUT))

    answer(create)
    gc.freeze()  # a collection that walks through all of torch takes 0.1 s
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), name="pool", daemon=True).start()
    while True:
        job = jobs.get()
        answer(lambda: _call(job, world[0]))  # noqa: B023  called at once


def _receive(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(connection.recv_bytes())
    os._exit(0)  # pytest is gone


def _call(job: bytes, comm: Any) -> Any:
    before = threading.active_count()
    fn, args = pickle.loads(job)
    result = fn(comm, *args)
    # a test that leaves threads behind would slow down, or break, an innocent later one
    end = time.monotonic() + 2.0
    while threading.active_count() > before + 1 and time.monotonic() < end:  # the issuing thread starts at the first operation
        time.sleep(0.01)
    left = [thread.name for thread in threading.enumerate()]
    assert threading.active_count() <= before + 1, f"threads left behind: {left}"
    return result


def _story(error: BaseException) -> str:
    """The traceback; with all local variables where an assertion failed, because the two sides of it are among them."""
    told = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
    return "".join(told.format())
