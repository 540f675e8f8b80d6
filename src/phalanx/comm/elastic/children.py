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
from phalanx.comm.launch import MEETING, MEMBER, SECRET
from phalanx.comm.settings import AGENT

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Children:
    """Processes that run `python ARGUMENTS`, each as one member."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    codes: dict[int, int] = field(default_factory=dict)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    spares: Spares = field(default_factory=Spares)

    def start(self, member: int, point: MeetingPoint) -> None:
        own = {MEETING: point.to_text(), MEMBER: str(member)}
        spare = self.spares.take(own)
        self.processes[member] = spare or start_python(self.arguments, {**self.env, **own}, subprocess.DEVNULL)
        self.spares.postpone()

    @property
    def running(self) -> set[int]:
        return set(self.processes) - self.codes.keys()

    def ended(self) -> dict[int, End]:
        """Members whose processes have ended since the last call, and how."""
        found = {}
        for member in self.running:
            if (code := self.processes[member].poll()) is not None:
                self.codes[member] = code
                found[member] = End(code)
        return found

    def signal(self, number: int) -> None:
        for member in self.running:
            with contextlib.suppress(ProcessLookupError):
                self.processes[member].send_signal(number)

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
            process.wait()


def environment(secret: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of all ranks of an agent."""
    found = {name: value for name, value in environ.items() if name not in LAUNCHER}
    found |= {SECRET: secret, AGENT: str(os.getpid())}
    found.setdefault("OMP_NUM_THREADS", "1")  # ranks that share a machine compete for its cores
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return found
