"""What the kernel knows about a process on this host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from phalanx._kernel import boot_id

EXITING = 0x4  # PF_EXITING of the kernel: set as soon as a process starts to exit, before any connection is closed


class Process(NamedTuple):
    """A process as /proc shows it. Process ids are reused, so only the start time makes it unique."""

    name: str
    state: str  # a letter: Z and X are dead, T and t stopped
    parent: int
    started: str
    flags: int

    @property
    def dead(self) -> bool:
        """Whether it has started to exit: its connections may close some time before its state changes."""
        return self.state in "ZX" or bool(self.flags & EXITING)

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look_up(pid: int) -> Process | None:
    """Return the process with this id, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    end = text.rindex(")")  # the name is in parentheses, and may contain some itself
    rest = text[end + 2 :].split()
    return Process(text[text.index("(") + 1 : end], rest[0], int(rest[1]), rest[19], int(rest[6]))


class Fate(str, Enum):
    """Why a process will never answer."""

    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process on any host. `home` is the kernel and pid namespace in which `pid` is valid."""

    home: str
    pid: int
    started: str

    @staticmethod
    def mine() -> ProcessId:
        found = look_up(os.getpid())
        return ProcessId(_home(), os.getpid(), found.started if found else "?")

    def to_text(self) -> str:
        return f"{self.home} {self.pid} {self.started}"

    @staticmethod
    def parse(text: str) -> ProcessId:
        home, pid, started = text.split()
        return ProcessId(home, int(pid), started)

    @property
    def fate(self) -> Fate | None:
        """Why the process will never answer, according to the kernel. None if it may answer, or is on another host."""
        if self.home != _home():
            return None
        found = look_up(self.pid)
        if found is None or found.started != self.started or found.dead:
            return Fate.DEAD
        return Fate.STOPPED if found.stopped else None


def _home() -> str:
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"
