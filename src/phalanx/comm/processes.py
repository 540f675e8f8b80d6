"""What the kernel knows of a process on this host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from phalanx._kernel import boot_id

EXITING = 0x4  # PF_EXITING of the kernel: set from the first moment of an end, before any connection is closed


class Process(NamedTuple):
    """A process as /proc shows it. Process ids are reused, so only the start time makes one unique."""

    name: str
    state: str  # a letter: Z and X are dead, T and t stopped
    parent: int
    started: str
    flags: int

    @property
    def dead(self) -> bool:
        """Whether it has begun to end: its connections may be closed a while before its state changes."""
        return self.state in "ZX" or bool(self.flags & EXITING)

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look_up(pid: int) -> Process | None:
    """The process with this id, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    end = text.rindex(")")  # the name is in brackets, and may contain some
    rest = text[end + 2 :].split()
    return Process(text[text.index("(") + 1 : end], rest[0], int(rest[1]), rest[19], int(rest[6]))


class Fate(str, Enum):
    """Why a process will never answer."""

    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of any host. `home` is the kernel and pid namespace in which `pid` means something."""

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
        """What the kernel says of a process on this host; None if it may answer, or is on another host."""
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
