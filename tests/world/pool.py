"""Worker processes that stay between tests: `Pool(n).run(fn, *args)` calls `fn(comm, *args)` on n ranks of one world.

To start a rank is to import torch, 2 to 3 s of CPU. So all ranks of all worlds are forked from a process that has imported it:
tests/warm/popen.py.

    pytest                                  rank r of a pool
    Pool.run(fn, *args): starts ----------> comm = create_communicator()
      pickled (fn, args) -----------------> fn(comm, *args)
      results in rank order <-------------- pickled result, or the traceback as text

A rank ends when its connection to pytest breaks, whatever pytest died of and whatever the rank was doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from tests.warm.popen import ROOT, Python, warm

DEADLINE = 60.0  # seconds of one `run`, on a busy machine
START_DEADLINE = 90.0  # seconds until all ranks of a new pool have met
TIMEOUT = 40.0  # of the communicator: its own diagnosis of a hang comes before the deadline
GRACE = 2.0  # seconds that the other ranks get after one has failed: they may be waiting for it
SHOWN = 20_000  # characters of a rank's output in a failure


class WorldError(AssertionError):
    """A rank raised, died or did not answer in time; the message has tracebacks, or all stacks of all ranks."""


@dataclass(frozen=True)
class Worker:
    """One rank as pytest sees it."""

    process: Python
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
        return [worker.process.pid for worker in self._workers]

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
            worker.process.wait(10)
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
        warm()
        # without what a launcher leaves, under which pytest itself may run
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI"))
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        # torch's store asks the DNS for the name of everyone who connects: a server that does not answer costs 5 s each time
        env.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        env |= {**self._env, "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        for rank in range(self.size):
            mine, theirs = Pipe()
            command = [sys.executable, "-m", "tests.world.pool", str(theirs.fileno())]
            log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the rank; has no name: nothing to clean up
            with open(f"/proc/{os.getpid()}/fd/{log.fileno()}", "ab") as voice:  # has an offset of its own
                streams = {"stdin": subprocess.DEVNULL, "stdout": voice, "stderr": voice}
                process = Python(command, **streams, pass_fds=[theirs.fileno()], cwd=ROOT, env=env | {"RANK": str(rank)})
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(5)
        return f"its process ended with exit code {worker.process.returncode}; its last words:\n{worker.output()}"

    def _stacks(self) -> Sequence[str]:
        """What every rank wrote, ending with the stacks of all its threads."""
        for worker in self._workers:
            worker.process.send_signal(signal.SIGUSR1)  # which does nothing to one that has ended
        time.sleep(1.0)
        return [worker.output() for worker in self._workers]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- in the rank ------------------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for pytest, which ends us
    faulthandler.enable()
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


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
