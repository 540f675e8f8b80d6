"""Starts local ranks without a launcher, forwards signals to them, and returns the exit code of the first failure.

    start_ranks(4, ["-m", "phalanx", "train", "digits"])

Rank 0 holds the store at a loopback port that this process opened for it, so there is no race for a free port, and no other host
can connect. A secret in the ranks' environment signs what they write there, so other users of this host cannot write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from phalanx.comm.launch import LISTENER, SECRET
from phalanx.comm.settings import AGENT, agent

ASKS = (signal.SIGTERM, signal.SIGINT)
HANDLED = (*ASKS, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1  # of prctl(2)
LOOK = 0.02  # seconds between two polls of the ranks
ASKED_AFTER = 8.0  # seconds without writing after which a rank is asked to end, once another has failed
KILLED_AFTER = 30.0  # seconds without writing after which a rank that was asked to end is killed
INSISTED = 2.0  # seconds that ranks have after a second Ctrl-C


class Ranks:
    """Processes of this host that are the ranks of one job."""

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        outputs: Callable[[int], IO[bytes] | None] = lambda rank: None,
        pass_fds: Mapping[int, Sequence[int]] | None = None,
        held: bool = False,
    ) -> None:
        """Start `python ARGUMENTS` `count` times. `outputs` may give a rank a file for everything it prints.

        With `held`, SIGTERM and SIGINT stay blocked until a rank unblocks them: Python would print a traceback during its start.
        """
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, count)) as listener:
            common = dict(os.environ if env is None else env) | {
                AGENT: str(os.getpid()),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                SECRET: secrets.token_hex(32),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
            }
            common.setdefault("OMP_NUM_THREADS", "1")  # ranks that share a machine compete for its cores
            common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKS if held else ())
            try:
                for rank in range(count):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    fds = list((pass_fds or {}).get(rank, ()))
                    if rank == 0:
                        own[LISTENER] = str(listener.fileno())
                        fds.append(listener.fileno())
                    output = outputs(rank)
                    self.processes.append(
                        subprocess.Popen(
                            [sys.executable, *arguments],
                            env=common | own,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT if output else None,
                            pass_fds=fds,
                            start_new_session=True,  # so that Ctrl-C comes from this process only, and not from the terminal too
                        )
                    )
            except BaseException:
                self.kill()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    @property
    def failed(self) -> list[int]:
        """The ranks that have exited with an error."""
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def send(self, number: int) -> None:
        for process in self.running:
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all ranks, and return when none is left."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start_ranks(count: int, arguments: Sequence[str], *, held: bool = False, too_early: str = "") -> int:
    """Run `python ARGUMENTS` as `count` ranks of this host and wait. Return the exit code of the first that failed, or 0.

    Signals that ask to end are forwarded to the ranks, and the exit code is then 128 + the signal. A rank that was asked to end
    has half a minute, and longer while it writes, because it may be saving. After a second Ctrl-C it has INSISTED seconds.

    With `held`, SIGTERM and SIGINT stay blocked until a rank has started and unblocks them. If one ends rank 0 before it handles
    them itself, `too_early` is printed.
    """
    heard: list[int] = []
    ranks = None
    with handling(heard):
        try:
            ranks = Ranks(count, arguments, held=held)
            code = _wait(ranks, heard)
            if too_early and -ranks.processes[0].returncode in heard:  # by the signal's default action: there was no handler
                sys.stderr.write(f"{too_early}\n")
            return code
        finally:
            if ranks is not None:
                ranks.kill()


def _wait(ranks: Ranks, heard: list[int]) -> int:
    sent = 0
    first: int | None = None
    leaving: _Leaving | None = None
    insisted: float | None = None
    while ranks.running:
        while sent < len(heard):
            if heard[sent] == signal.SIGTSTP:
                del heard[sent]
                ranks.send(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell runs `fg`
                ranks.send(signal.SIGCONT)
                continue
            ranks.send(heard[sent])
            sent += 1
            leaving = _Leaving(ranks, asked=True)
            if heard[:sent].count(signal.SIGINT) > 1:
                insisted = insisted or time.monotonic()
        if insisted is not None and time.monotonic() - insisted > INSISTED:
            ranks.send(signal.SIGKILL)
        if first is None and (failed := ranks.failed):
            first = failed[0]
            leaving = leaving or _Leaving(ranks, asked=False)
        if leaving is not None:
            leaving.look()
        time.sleep(LOOK)
    failed = ranks.failed
    if not failed:
        return 0
    if heard:
        return 128 + heard[0]
    code = ranks.processes[failed[0] if first is None else first].returncode
    return code if code > 0 else 128 - code


class _Leaving:
    """Ends ranks: a rank that neither exits nor writes gets SIGTERM, and later SIGKILL."""

    def __init__(self, ranks: Ranks, *, asked: bool) -> None:
        self._ranks = ranks
        self._written: dict[int, tuple[int, float]] = {}  # bytes written, and when the number last grew
        self._asked = {process.pid for process in ranks.running} if asked else set()

    def look(self) -> None:
        now = time.monotonic()
        for process in self._ranks.running:
            written, since = self._written.get(process.pid, (-1, now))
            if (more := _bytes_written(process.pid)) != written:
                written, since = more, now
            self._written[process.pid] = written, since
            if process.pid in self._asked and now - since > KILLED_AFTER:
                process.kill()
            elif process.pid not in self._asked and now - since > ASKED_AFTER:
                process.terminate()
                self._asked.add(process.pid)
                self._written[process.pid] = written, now


def _bytes_written(pid: int) -> int:
    """Return the bytes written to files, not to sockets and pipes, as far as the kernel distinguishes them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/io").read_text().split("write_bytes: ")[1].split()[0])
    return 0


@contextlib.contextmanager
def handling(heard: list[int]) -> Iterator[None]:
    """Append signals to `heard` instead of ending. This includes Ctrl-Z: the ranks have to stop before this process does."""

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (*HANDLED, signal.SIGTSTP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_agent() -> None:
    """Make this rank of `start_ranks` get a SIGTERM when the agent dies, because then no process supervises the ranks."""
    started_by = agent()
    if started_by is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != started_by:  # it died before this call
            sys.stderr.write(f"phalanx: process {started_by} ({AGENT}), which started this rank, is gone: the rank ends\n")
            os.kill(os.getpid(), signal.SIGTERM)
