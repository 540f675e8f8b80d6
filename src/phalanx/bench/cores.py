"""Pin ranks to cores, and detect ranks that share one: they wait for each other even if another core is idle."""

from __future__ import annotations

import os
from pathlib import Path

CORES = sorted(os.sched_getaffinity(0))  # read before a rank is pinned


def pin(rank: int) -> None:
    """Keep this process on one core. Call it before any thread starts: threads inherit it."""
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})


def core_now() -> int | None:
    """The core of the calling thread; None if /proc does not tell."""
    try:
        return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    except OSError:
        return None


def are_crowded(places: list[tuple[int, int | None]]) -> bool:
    """Whether two of the ranks at (host, core) share a core."""
    known = [place for place in places if place[1] is not None]
    return len(set(known)) < len(known)
