"""Python programs without the seconds that `import torch` takes: a process that has imported it forks them.

    @pytest.mark.usefixtures("warm_python")
    def test_it():
        done = subprocess.run([sys.executable, "-m", "phalanx", "train"], capture_output=True, timeout=60)

What starts this way is a process like any other: it has its own environment, directory, descriptors, session, signals and exit
code, its parent is the process that asked for it, and it runs its program from the first line. Only its imports are warm. Where
imports, the executable or its options are the subject of a test, start a real one.

    pytest ------ asks ------> zygote: has imported torch and phalanx, has one thread and has computed nothing
      |                          | fork
      |                          middle: forks the program and ends, so that its parent becomes pytest
      +-- waits for ---------------> program

A launcher gets a zygote of its own, by which its ranks are warm as well. So does each worker of `pytest -n 3`, all of which are
forked from one zygote themselves: tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import multiprocessing.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import phalanx

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("phalanx", "torch.distributed.run")  # modules that start other Python programs
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
READ_AT_START = ("PYTHONIOENCODING", "LD_PRELOAD")  # variables that a running interpreter does not heed
NO_MATTER = ("-B",)  # options of the interpreter that change nothing for a program
LARGEST = 1 << 17  # bytes of a request


@dataclass(frozen=True)
class Request:
    """A program: `python WORDS`, with descriptors under these numbers."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    descriptors: list[int]
    network: str | None = None  # the file of a network namespace
    new_session: bool = False
    terminal: bool = False
    ends_wholly: bool = False
    launches: bool = False
    tests: bool = False


class Zygote:
    """The process that forks, as those see it whose programs it forks."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen | None = None) -> None:
        self._connection = connection
        self._process = process  # where it is not forked itself; a Popen that is forgotten complains
        self._asking = threading.Lock()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The process id of the program. It is a child of this process."""
        message = json.dumps(asdict(request)).encode()
        assert len(message) < LARGEST, f"a command and an environment of {len(message)} bytes"
        with self._asking, _adopting():
            socket.send_fds(self._connection, [message], descriptors)
            answer = self._connection.recv(64)
        assert answer, "the process that forks programs has died"
        return int(answer)


class Python(subprocess.Popen):
    """A Popen whose command is [sys.executable, ...]. It forks where it can, and executes where an option asks for it."""

    zygote: Zygote | None = None  # of this process
    launches = False  # other Python programs, which shall be warm too; LAUNCHERS do anyway
    ends_wholly = False  # takes all libraries apart, as every process does, in 0.4 s; otherwise only the program and phalanx
    terminal = False  # its stdin becomes the terminal of its new session
    tests = False  # is a worker of pytest: what it starts is cold unless a test asks for warm, and ends with it

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(super()._execute_child).bind(*given).arguments
        network, command = _split(call["args"])
        if Python.zygote is None or not _can_fork(command, call):
            super()._execute_child(*given)
            return
        pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [own if own != -1 else inherited for inherited, own in enumerate(pipes[i] for i in (0, 3, 5))]
        try:
            request = Request(
                words=[os.fspath(word) for word in command[1:]],
                env=dict(os.environ if call["env"] is None else call["env"]),
                cwd=os.fspath(call["cwd"] or os.getcwd()),
                descriptors=[0, 1, 2, *call["pass_fds"]],
                network=network,
                new_session=bool(call["start_new_session"]),
                terminal=self.terminal,
                ends_wholly=self.ends_wholly,
                launches=self.launches or ("-m" in command[1:3] and command[command.index("-m") + 1] in LAUNCHERS),
                tests=self.tests,
            )
            self.pid = Python.zygote.fork(request, [*streams, *call["pass_fds"]])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


class Worker(Python):
    """A worker of `pytest -n`. It has a zygote of its own, which costs it a fork and no import."""

    launches = tests = True


def _split(args: Any) -> tuple[str | None, list[Any]]:
    """The network that a command is to run in, as benchmarks/lab.py has it, and the command."""
    match args:
        case ["nsenter", str(option), "--", *command] if option.startswith("--net="):
            return option.removeprefix("--net="), command
        case [*command]:
            return None, command
    return None, []


def _can_fork(command: list[Any], call: dict[str, Any]) -> bool:
    if len(command) < 2 or command[0] != sys.executable:
        return False
    if str(command[1]).startswith("-") and command[1] not in ("-c", "-m", "-u"):
        return False
    special = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    known = not any(call[name] for name in special) and not any(name in (call["env"] or {}) for name in READ_AT_START)
    return known and call["close_fds"] and call["umask"] == -1 and call.get("process_group", -1) == -1


def spawn(path: Any, args: Sequence[Any], descriptors: Sequence[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`, by which the start method "spawn" starts a process."""
    words = [os.fsdecode(word) for word in args[1:] if word not in NO_MATTER]
    if Python.zygote is None or words[0] != "-c":
        return _spawn(path, args, descriptors)
    numbers = [0, 1, 2, *descriptors]
    return Python.zygote.fork(Request(words, dict(os.environ), os.getcwd(), numbers), numbers)


_spawn = multiprocessing.util.spawnv_passfds


def warm() -> None:
    """Start the zygote of this process, once. It ends when this process does."""
    if Python.zygote is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # the package that this process tests: installed, or the sources beside these tests
        env = os.environ | {"PYTHONPATH": str(Path(phalanx.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        null = subprocess.DEVNULL
        command = [sys.executable, str(ROOT / "tests/warm/server.py"), str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=null, stdout=null, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        Python.zygote = Zygote(ours, process)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """This process becomes the parent of grandchildren whose parent ends. Only for a moment: orphans of others are not ours."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
