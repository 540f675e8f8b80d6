"""The ranks that an agent has started on its host: processes, their ends, and signals to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.comm.elastic.agents import End
from phalanx.comm.elastic.board import MeetingPoint
from phalanx.comm.elastic.spares import Spares, start_python
from phalanx.comm.ending import say_last
from phalanx.comm.launch import MEETING, MEMBER, SECRET
from phalanx.comm.settings import AGENT

NOT_STARTED = 71  # the exit code of a rank whose process could not start: EX_OSERR of sysexits.h
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Children:
    """Processes that run `python ARGUMENTS`, each as one member."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    codes: dict[int, int] = field(default_factory=dict)
    processes: dict[int, subprocess.Popen[bytes] | None] = field(default_factory=dict)  # None: it could not start
    spares: Spares = field(default_factory=Spares)

    def start(self, member: int, point: MeetingPoint) -> None:
        own = {MEETING: point.to_text(), MEMBER: str(member)}
        process = self.spares.take(own)
        try:
            process = process or start_python(self.arguments, {**self.env, **own}, subprocess.DEVNULL)
        except OSError as error:  # no more processes, or no memory for one
            say_last(f"member {member} cannot start ({error.strerror})")
        self.processes[member] = process
        self.spares.postpone()

    @property
    def running(self) -> set[int]:
        return set(self.processes) - self.codes.keys()

    def ended(self) -> dict[int, End]:
        """Members whose processes have ended since the last call, and how."""
        found = {}
        for member in self.running:
            process = self.processes[member]
            if (code := NOT_STARTED if process is None else process.poll()) is not None:
                self.codes[member] = code
                found[member] = End(code)
        return found

    def signal(self, number: int) -> None:
        for member in self.running:
            if (process := self.processes[member]) is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def suspend_all(self) -> None:
        """Stop the ranks, then this process. After `fg` in the shell, let the ranks continue and return."""
        self.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all ranks and spares, even stopped ones, and return when none is left."""
        self.spares.kill()
        self.signal(signal.SIGKILL)
        for process in self.processes.values():
            if process is not None:
                process.wait()


def environment(secret: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of all ranks of an agent."""
    found = {name: value for name, value in environ.items() if name not in LAUNCHER}
    found |= {SECRET: secret, AGENT: str(os.getpid())}
    found.setdefault("OMP_NUM_THREADS", "1")  # ranks that share a machine compete for its cores
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return found
