"""Schedules by name, such as `torus:4x8`, and from files. This is the only table of names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import (
    binomial,
    gossip,
    halving_doubling,
    hierarchical,
    quantised,
    recursive_doubling,
    ring,
    scatter_gather,
    swing,
    torus,
    tree,
)
from .jsonform import from_json
from .limits import MAX_LOWERED, MAX_RANKS, MAX_WORK, work
from .lower import lower
from .msccl_import import from_msccl
from .mscclpp_import import from_mscclpp
from .ops import Schedule, ScheduleError
from .text import from_text
from .traffic import lowered_ops
from .verify import verify

PIPED = 64 << 20  # bytes; the limit for a pipe or device, whose size cannot be checked first


class InputError(ValueError):
    """Invalid input from a user: a name, number or file. The message says what is valid."""


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """The form of the text after the colon, and the function that takes its numbers."""

    form: str
    pattern: str
    make: Callable[..., Schedule]


def _hypercube(n: int, number: int = 0) -> Schedule:
    return gossip(n, number, "hypercube")


def _dissemination(n: int, number: int = 0) -> Schedule:
    return gossip(n, number)


def _exact(n: int, number: int = 0) -> Schedule:
    return gossip(n, number, "exact")


SCHEDULES = {
    "ring": NamedSchedule("N", r"\d+", ring),
    "torus": NamedSchedule("ROWSxCOLS", r"\d+(x\d+)*", torus),
    "quantised": NamedSchedule("HOSTSxPER_HOST", r"\d+x\d+", quantised),
    "hierarchical": NamedSchedule("HOSTSxPER_HOST", r"\d+x\d+", hierarchical),
    "halving-doubling": NamedSchedule("N", r"\d+", halving_doubling),
    "recursive-doubling": NamedSchedule("N", r"\d+", recursive_doubling),
    "tree": NamedSchedule("N", r"\d+", tree),
    "swing": NamedSchedule("N", r"\d+", swing),
    "gossip": NamedSchedule("N[:ROUND]", r"\d+(:\d+)?", _dissemination),
    "gossip-hypercube": NamedSchedule("N[:ROUND]", r"\d+(:\d+)?", _hypercube),
    "gossip-exact": NamedSchedule("N[:ROUND]", r"\d+(:\d+)?", _exact),
    "binomial": NamedSchedule("N", r"\d+", binomial),
    "scatter-gather": NamedSchedule("N", r"\d+", scatter_gather),
}

FORMS = ", ".join(f"{name}:{entry.form}" for name, entry in SCHEDULES.items())


def find_schedule(text: str) -> Schedule:
    """Find the schedule named `text` in the table, or read it from the file `text`.

    Files hold text, JSON, the XML of MSCCL or the JSON of MSCCL++.

    Raises InputError if there is neither, and ScheduleError if the file does not hold a schedule.
    """
    name, colon, rest = text.partition(":")
    if colon and name in SCHEDULES:
        return parse_name(text)
    if not is_file(text):
        hint = f" (write {name}:{SCHEDULES[name].form})" if rest == "" and name in SCHEDULES else ""
        raise InputError(f"{text!r} is neither a schedule nor a file{hint}; the schedules are {FORMS}")
    content = read_text(text)
    try:
        return _read(content)
    except ScheduleError as error:
        raise ScheduleError(f"{text}: {error}") from None


def _read(content: str) -> Schedule:
    """Read a schedule from JSON, MSCCL++'s JSON, MSCCL's XML, or text."""
    start = content.lstrip()[:1]
    if start == "{":
        return from_mscclpp(content) if '"gpus"' in content and '"threadblocks"' in content else from_json(content)
    return from_msccl(content) if start == "<" else from_text(content)


def find_all_reduce(text: str, ranks: int, option: str) -> Schedule:
    """Find and verify the all-reduce of `ranks` ranks named `text`. Errors begin with `option`."""
    s = find_schedule(text)
    if s.world != ranks:
        raise InputError(f"{option} is for {s.world} ranks, but there are {ranks}")
    if s.goal != "sum":
        raise InputError(f"{option} computes a {s.goal}, not the sum of an all-reduce")
    if s.coded:
        raise InputError(f"{option} rounds what it sums; set wire=int8 instead, which runs it with error feedback")
    if work(s) > MAX_WORK:
        raise InputError(f"{option}: checking it takes {work(s):,} additions, more than {MAX_WORK:,}")
    try:
        verify(s, bitwise=True)
        if lowered_ops(s) <= MAX_LOWERED:
            verify(lower(s))
    except ScheduleError as error:
        raise ScheduleError(f"{option}: {error}") from None
    return s


def parse_name(text: str) -> Schedule:
    """Turn `torus:4x8` into `torus(4, 8)`, and likewise for the other names of the table."""
    name, _, rest = text.partition(":")
    if name not in SCHEDULES:
        raise InputError(f"no schedule is called {name!r}; there are {FORMS}")
    entry = SCHEDULES[name]
    if not re.fullmatch(entry.pattern, rest, re.ASCII) or len(rest) > 60:
        raise InputError(f"{text!r} does not have the form {name}:{entry.form}")
    numbers = [int(number) for number in re.split("[x:]", rest)]
    ranks = 1
    for size in numbers if "x" in rest else numbers[:1]:
        ranks *= size
    if ranks > MAX_RANKS:
        raise InputError(f"{text}: {ranks} ranks; the command line takes at most {MAX_RANKS}")
    try:
        return entry.make(*numbers)
    except ValueError as error:
        raise InputError(f"{text}: {error}") from None


def is_file(text: str | Path) -> bool:
    """Whether the file exists; False for names that no file can have."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """Read the text of a file or pipe that a user named."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {error}") from None


def read_bytes(path: str | Path) -> bytes:
    """Read the bytes of a file or pipe that a user named."""
    try:
        with open(path, "rb") as file:
            endless = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # a pipe, or /dev/zero
            data = file.read(PIPED + 1 if endless else -1)
        if endless and len(data) > PIPED:
            raise InputError(f"{path} is not a regular file and gives more than {PIPED:,} bytes")
        return data
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
