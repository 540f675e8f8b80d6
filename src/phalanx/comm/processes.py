"""What the kernel says of a process on this host."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

EXITING = 0x4  # PF_EXITING of the kernel: set from the first moment of an end, before any connection is closed


class Process(NamedTuple):
    """A process as /proc shows it; with its start time its id is unique, because ids come round again."""

    name: str
    state: str  # a letter: Z and X are dead, T and t stopped
    parent: int
    started: str
    flags: int

    @property
    def dead(self) -> bool:
        """Whether it has begun to end: its connections may be closed a while before its state says so."""
        return self.state in "ZX" or bool(self.flags & EXITING)


def look_up(pid: int) -> Process | None:
    """The process with this id, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    end = text.rindex(")")  # the name is in brackets, and may contain some
    rest = text[end + 2 :].split()
    return Process(text[text.index("(") + 1 : end], rest[0], int(rest[1]), rest[19], int(rest[6]))
