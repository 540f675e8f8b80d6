"""Schedules by the names that the command line knows, and from files: the one table that turns words into values."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx import schedule
from phalanx.schedule import Schedule
from phalanx.schedule.limits import MAX_LOWERED, MAX_RANKS, MAX_WORK, work

PIPED = 64 << 20  # bytes that are read of what is no file


class UsageError(ValueError):
    """What was typed makes no sense; the message says what would."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How a name continues after its colon, and what it makes of the numbers there."""

    form: str
    pattern: str
    make: Callable[..., Schedule]


def _hypercube(n: int, number: int = 0) -> Schedule:
    return schedule.gossip(n, number, "hypercube")


def _dissemination(n: int, number: int = 0) -> Schedule:
    return schedule.gossip(n, number)


SCHEDULES = {
    "ring": Entry("N", r"\d+", schedule.ring),
    "torus": Entry("ROWSxCOLS", r"\d+(x\d+)*", schedule.torus),
    "hierarchical": Entry("HOSTSxPER_HOST", r"\d+x\d+", schedule.hierarchical),
    "halving-doubling": Entry("N", r"\d+", schedule.halving_doubling),
    "recursive-doubling": Entry("N", r"\d+", schedule.recursive_doubling),
    "tree": Entry("N", r"\d+", schedule.tree),
    "gossip": Entry("N[:ROUND]", r"\d+(:\d+)?", _dissemination),
    "gossip-hypercube": Entry("N[:ROUND]", r"\d+(:\d+)?", _hypercube),
    "binomial": Entry("N", r"\d+", schedule.binomial),
    "scatter-gather": Entry("N", r"\d+", schedule.scatter_gather),
}

FORMS = ", ".join(f"{name}:{entry.form}" for name, entry in SCHEDULES.items())


def find_schedule(text: str) -> Schedule:
    """The schedule called `text` in the table, or else the one in the file of that name, text or JSON."""
    name, colon, rest = text.partition(":")
    if colon and name in SCHEDULES:
        return parse_name(text)
    if not is_file(text):
        hint = f" (it goes on: {name}:{SCHEDULES[name].form})" if rest == "" and name in SCHEDULES else ""
        raise UsageError(f"{text!r} is neither a schedule nor a file{hint}; the schedules are {FORMS}")
    content = read_text(text)
    try:
        return schedule.from_json(content) if content.lstrip().startswith("{") else schedule.from_text(content)
    except schedule.ScheduleError as error:
        raise schedule.ScheduleError(f"{text}: {error}") from None


def find_all_reduce(text: str, ranks: int, option: str) -> Schedule:
    """The schedule called `text`, proved: a file may hold a wrong one, and every rank would say so."""
    s = find_schedule(text)
    if s.world != ranks:
        raise UsageError(f"{option} is for {s.world} ranks, but there are {ranks}")
    if s.goal != "sum":
        raise UsageError(f"{option} computes a {s.goal}, not the sum that an all-reduce is")
    if work(s) > MAX_WORK:
        raise UsageError(f"{option}: to check it takes {work(s):,} additions, more than {MAX_WORK:,}")
    try:
        schedule.verify(s)
        if schedule.lowered_ops(s) <= MAX_LOWERED:
            schedule.verify(schedule.lower(s))
    except schedule.ScheduleError as error:
        raise schedule.ScheduleError(f"{option}: {error}") from None
    return s


def check_environment() -> None:
    """Raise UsageError for a PHALANX_ variable that makes no sense: one line here is better than one from each rank."""
    from phalanx.comm.settings import check_settings

    try:
        check_settings()
    except ValueError as error:  # a ScheduleError is one
        raise UsageError(str(error)) from None


def is_file(text: str | Path) -> bool:
    """Whether there is such a file; no name is too odd or too long to ask."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """The text of a file, or of a pipe, that was named on the command line."""
    try:
        with open(path, "rb") as file:
            endless = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # a pipe, or /dev/zero
            data = file.read(PIPED + 1 if endless else -1)
        if endless and len(data) > PIPED:
            raise UsageError(f"{path} is no file, and gives more than {PIPED:,} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def parse_name(text: str) -> Schedule:
    """`torus:4x8` as `torus(4, 8)`, and so on for the names of the table."""
    name, _, rest = text.partition(":")
    if name not in SCHEDULES:
        raise UsageError(f"no schedule is called {name!r}; there are {FORMS}")
    entry = SCHEDULES[name]
    if not re.fullmatch(entry.pattern, rest, re.ASCII) or len(rest) > 60:
        raise UsageError(f"{text!r} does not have the form {name}:{entry.form}")
    numbers = [int(number) for number in re.split("[x:]", rest)]
    ranks = 1
    for size in numbers if "x" in rest else numbers[:1]:
        ranks *= size
    if ranks > MAX_RANKS:
        raise UsageError(f"{text}: {ranks} ranks; the command line takes at most {MAX_RANKS}")
    try:
        return entry.make(*numbers)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None
