"""Planned schedules, from the file that PHALANX_SCHEDULES names, if it is for this number of hosts and ranks.

`phalanx plan --schedules FILE` writes it, after a model of the cluster, with a profile of its network, has priced every
all-reduce for every size. The file holds the schedules themselves. They are verified here like a user's schedules.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.comm.hosts import Hosts
from phalanx.schedule import Schedule, ScheduleError, lower, lowered_ops, verify
from phalanx.schedule.jsonform import from_data
from phalanx.schedule.limits import MAX_LOWERED, MAX_RANKS, MAX_WORK, work
from phalanx.schedule.plain_json import loads, read_whole

PLANNED = "PHALANX_SCHEDULES"
LARGEST = 1 << 62  # bytes; an upper bound for any message


@dataclass(frozen=True, slots=True)
class Plan:
    """Verified all-reduces for `grid`: (hosts, ranks per host). Each serves messages up to its bytes, smallest first."""

    grid: tuple[int, int]
    ranges: tuple[tuple[int, Schedule], ...]
    origin: str = ""


def planned_for(hosts: Hosts) -> Plan | None:
    """Return the plan for these hosts, with ranks in their order. None if there is no file, or it is for other hosts."""
    path = os.environ.get(PLANNED)
    if not path or hosts.grid is None:
        return None
    plan = _read(path)
    return plan if plan.grid == hosts.grid else None


def warn_if_unplanned(hosts: Hosts) -> None:
    """Warn if PHALANX_SCHEDULES is set, but for another world."""
    path = os.environ.get(PLANNED)
    if path and planned_for(hosts) is None:
        (count, width), found = _read(path).grid, " and ".join(str(len(ranks)) for ranks in hosts.ranks)
        warnings.warn(
            f"{PLANNED}={path} is for {count} hosts of {width} ranks, but this job has hosts of {found}, so its schedules are "
            "not used: make a plan for this job with `phalanx plan --schedules`",
            stacklevel=3,
        )


def check_planned(environ: Mapping[str, str] = os.environ) -> None:
    """Raise if PHALANX_SCHEDULES names a file without valid schedules."""
    if path := environ.get(PLANNED):
        _read(path)


@functools.lru_cache(maxsize=4)
def _read(path: str) -> Plan:
    """Read the plan in a file. Errors name the file."""
    try:
        return replace(parse_planned(Path(path).read_text(encoding="utf-8")), origin=f"{PLANNED}={path}")
    except OSError as error:
        raise ValueError(
            f"{PLANNED}={path}: {error.strerror}; leave it unset, or make one with `phalanx plan --schedules`"
        ) from None
    except ScheduleError as error:
        raise ScheduleError(f"{PLANNED}={path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{PLANNED}={path} is not what `phalanx plan --schedules` writes: {error}") from None


def parse_planned(text: str) -> Plan:
    """Parse a plan. Raise ValueError if `text` is anything else."""
    content = loads(text, deepest=None)
    try:
        grid = read_whole(content["hosts"], "hosts", 1, MAX_RANKS), read_whole(content["per_host"], "per_host", 1, MAX_RANKS)
        read = [(item["up_to"], from_data(item["schedule"])) for item in content["schedules"]]
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except TypeError:
        raise ValueError("its parts are not the expected objects and lists") from None
    if grid[0] * grid[1] > MAX_RANKS:
        raise ValueError(f"{grid[0]} hosts of {grid[1]} ranks; at most {MAX_RANKS} ranks in all")
    ranges = tuple((LARGEST if limit is None else read_whole(limit, "up_to", 1, LARGEST), schedule) for limit, schedule in read)
    for _, schedule in ranges:
        if schedule.goal != "sum" or schedule.world != grid[0] * grid[1]:
            raise ScheduleError(f"{schedule.name} is not an all-reduce of {grid[0]} x {grid[1]} ranks")
        if work(schedule) > MAX_WORK:
            raise ScheduleError(f"{schedule.name}: a check takes {work(schedule):,} additions, more than {MAX_WORK:,}")
        verify(schedule, bitwise=True)
        if lowered_ops(schedule) <= MAX_LOWERED:  # an extra check of the messages, which follow from the verified schedule
            verify(lower(schedule))
    if not ranges or [limit for limit, _ in ranges] != sorted({limit for limit, _ in ranges}):
        raise ValueError("`up_to` must grow from one schedule to the next")
    return Plan(grid, ranges)
