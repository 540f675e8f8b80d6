"""Which all-reduce for which message: the fastest schedule by size on a cluster, as a file that `create_communicator` reads.

The file holds the schedules themselves. You run exactly what was priced, and you need no planner for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from phalanx.schedule import Schedule, recursive_doubling, to_json

from .candidates import FAMILIES, algorithms
from .machine import Cluster
from .profile import BackendProfile
from .program import compile_schedule
from .simulate import run

SIZES = tuple(1 << power for power in range(10, 29))  # bytes
WORTH_IT = 0.03  # relative; a schedule that gains less does not replace the one for the next smaller size


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of up to `up_to` bytes and their schedule. None means all larger messages."""

    up_to: int | None
    schedule: Schedule


def choose_by_size(cluster: Cluster, profile: BackendProfile) -> tuple[Range, ...]:
    """The fastest all-reduces on `cluster`, smallest messages first."""
    schedules = [algorithm.make(0) for algorithm in algorithms(cluster, FAMILIES) if not algorithm.gossips]
    if cluster.ranks > 1:
        schedules.append(recursive_doubling(cluster.ranks))
    programs = [compile_schedule(schedule, cluster, profile) for schedule in schedules]
    ranges: list[Range] = []
    for size in SIZES:
        seconds = [run(program, size).seconds for program in programs]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        if ranges:
            before = next(i for i, schedule in enumerate(schedules) if schedule is ranges[-1].schedule)
            if seconds[before] <= seconds[best] * (1 + WORTH_IT):
                ranges[-1] = Range(size, schedules[before])
                continue
        ranges.append(Range(size, schedules[best]))
    return (*ranges[:-1], Range(None, ranges[-1].schedule))


def to_file(cluster: Cluster, profile: BackendProfile) -> str:
    """The choice as JSON, with schedules in the form of `phalanx.schedule.to_json`."""
    content = {
        "hosts": cluster.hosts,
        "per_host": cluster.per_host,
        "source": f"{profile.name} on {cluster.name}: {profile.source}",
        "schedules": [
            {"up_to": choice.up_to, "schedule": json.loads(to_json(choice.schedule))}
            for choice in choose_by_size(cluster, profile)
        ],
    }
    return json.dumps(content) + "\n"
