"""Which accesses to device memory are ordered: vector clocks, as a race detector has them.

    stream 1   write x  --record--.
    stream 2                       `--wait-- read x      ordered: stream 2's clock contains the write
    stream 3   read x                                    not ordered: an error, whatever this seed's result was

Clocks are made when the host enqueues, because that fixes what a stream waits for. What the host itself has waited for orders all
that it enqueues later. Memory is cut in bytes, so that two parts of one buffer do not disturb each other.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import NamedTuple

Clock = dict[int, int]  # by stream: the number of its latest kernel that is known to run before
Stack = tuple[tuple[CodeType, int], ...]

_OTHERS = ("/torch/", "/threading.py", "/_pytest/", "/pluggy/")
_OURS = __file__.rpartition("/")[0]


_shown: dict[int, tuple[bool, CodeType]] = {}  # by id, for hashing code takes long: whether it is the program's


def stack(skip: int = 1) -> Stack:
    """Where the caller is in the program: the innermost frames that are neither torch's nor those of this tool."""
    frame, found, left = sys._getframe(skip), [], 30
    while frame is not None and left and len(found) < 7:
        left -= 1
        code = frame.f_code
        known = _shown.get(id(code))
        if known is None:
            name = code.co_filename
            ours = name.startswith(_OURS) or any(part in name for part in _OTHERS)
            known = _shown[id(code)] = "/test_" in name or "/training.py" in name or not ours, code
        if known[0]:
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def show(where: Stack) -> str:
    """The stack as text, the innermost call first."""
    lines = [f"      {code.co_filename.rpartition('/src/')[2]}:{line} in {code.co_name}" for code, line in where]
    return "\n".join(lines) or "      (a thread of torch)"


def merge(clock: Clock, other: Clock) -> None:
    """`clock` knows what `other` knows."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Access(NamedTuple):
    """A kernel touches bytes [low, high) of a block."""

    low: int
    high: int
    writes: bool
    stream: int
    number: int
    kernel: str
    stack: Stack

    def text(self) -> str:
        return (
            f"    {self.kernel} {'writes' if self.writes else 'reads'} it on stream {self.stream}, queued at\n{show(self.stack)}"
        )


class UnorderedAccessError(AssertionError):
    """Two kernels touch the same memory, one of them writes, and nothing orders them."""


class History:
    """The accesses to one block that later ones must be ordered after."""

    __slots__ = ("accesses",)

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def add(self, new: Access, clock: Clock) -> Access | None:
        """Note an access by a kernel whose stream knows `clock`; returns one that it is not ordered after."""
        kept, conflict = [], None
        for old in self.accesses:
            ordered = old.stream == new.stream or clock.get(old.stream, 0) >= old.number
            overlaps = old.low < new.high and new.low < old.high
            if overlaps and not ordered and (old.writes or new.writes):
                conflict = old
            covered = ordered and new.low <= old.low and old.high <= new.high and (new.writes or not old.writes)
            if not covered:
                kept.append(old)
        kept.append(new)
        self.accesses = kept
        return conflict

    def forget(self, known: Clock) -> None:
        """The host has seen that these are over."""
        self.accesses = [old for old in self.accesses if known.get(old.stream, 0) < old.number]
