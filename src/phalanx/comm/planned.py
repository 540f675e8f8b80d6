"""Schedules that were planned: those of the file that PHALANX_SCHEDULES names, where it is for as many hosts and ranks.

`phalanx plan --schedules FILE` writes it: a model of the cluster, with a profile of its network, has priced every all-reduce for
every size. The file holds the schedules themselves, which are verified here like those of a user.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from phalanx.comm.hosts import Hosts
from phalanx.schedule import Schedule, ScheduleError, lower, lowered_ops, verify
from phalanx.schedule.jsonform import from_data
from phalanx.schedule.limits import MAX_LOWERED, MAX_RANKS, MAX_WORK, work
from phalanx.schedule.plain_json import loads, read_whole

PLANNED = "PHALANX_SCHEDULES"
LARGEST = 1 << 62  # bytes; no message is longer


def planned_for(hosts: Hosts) -> tuple[tuple[int, Schedule], ...]:
    """What the file has for these hosts, for ranks in their order, the smallest messages first; nothing if it is for others."""
    path = os.environ.get(PLANNED)
    if not path or hosts.grid is None:
        return ()
    grid, ranges = _read(path)
    return ranges if grid == hosts.grid else ()


def tell_if_unplanned(hosts: Hosts) -> None:
    """Warn where PHALANX_SCHEDULES is set, but for another world than this."""
    path = os.environ.get(PLANNED)
    if path and not planned_for(hosts):
        (count, width), found = _read(path)[0], " and ".join(str(len(ranks)) for ranks in hosts.ranks)
        warnings.warn(
            f"{PLANNED}={path} is for {count} hosts of {width} ranks, here are hosts of {found}: its schedules are not used;"
            " `phalanx plan --schedules` makes others",
            stacklevel=3,
        )


def check_planned(environ: Mapping[str, str] = os.environ) -> None:
    """Raise where PHALANX_SCHEDULES names a file that holds no schedules."""
    if path := environ.get(PLANNED):
        _read(path)


@functools.lru_cache(maxsize=4)
def _read(path: str) -> tuple[tuple[int, int], tuple[tuple[int, Schedule], ...]]:
    """What the file holds; errors name it."""
    try:
        return parse_planned(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{PLANNED}={path}: {error.strerror}; leave it unset, or make one with `phalanx plan --schedules`"
        ) from None
    except ScheduleError as error:
        raise ScheduleError(f"{PLANNED}={path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{PLANNED}={path} is not what `phalanx plan --schedules` writes: {error}") from None


def parse_planned(text: str) -> tuple[tuple[int, int], tuple[tuple[int, Schedule], ...]]:
    """Hosts, ranks per host, and the verified all-reduces with the bytes up to which they serve; ValueError for anything else."""
    content = loads(text, deepest=None)
    try:
        grid = read_whole(content["hosts"], "hosts", 1, MAX_RANKS), read_whole(content["per_host"], "per_host", 1, MAX_RANKS)
        read = [(item["up_to"], from_data(item["schedule"])) for item in content["schedules"]]
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except TypeError:
        raise ValueError("its parts are not objects and lists as they should be") from None
    if grid[0] * grid[1] > MAX_RANKS:
        raise ValueError(f"{grid[0]} hosts of {grid[1]} ranks; at most {MAX_RANKS} ranks in all")
    ranges = tuple((LARGEST if limit is None else read_whole(limit, "up_to", 1, LARGEST), schedule) for limit, schedule in read)
    for _, schedule in ranges:
        if schedule.goal != "sum" or schedule.world != grid[0] * grid[1]:
            raise ScheduleError(f"{schedule.name} is not an all-reduce of {grid[0]} x {grid[1]} ranks")
        if work(schedule) > MAX_WORK:
            raise ScheduleError(f"{schedule.name}: to check it takes {work(schedule):,} additions, more than {MAX_WORK:,}")
        verify(schedule)
        if lowered_ops(schedule) <= MAX_LOWERED:  # a check of the messages on top: they follow from what was verified
            verify(lower(schedule))
    if not ranges or [limit for limit, _ in ranges] != sorted({limit for limit, _ in ranges}):
        raise ValueError("`up_to` must grow from one schedule to the next")
    return grid, ranges
