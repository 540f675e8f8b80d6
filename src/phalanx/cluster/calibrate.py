"""A backend's profile, fitted to rows of `phalanx bench allreduce`: what this machine's library really takes.

Four numbers are fitted, each within wide bounds: seconds per message between hosts and inside a host, and the parts of both
bandwidths that are reached. The fit minimises the squared relative errors (of logarithms, so that 4 KiB counts as much as 64 MiB)
by searching along one number at a time; what is left is the profile's `residual`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import Any

import numpy as np

from phalanx.schedule import Schedule, halving_doubling, hierarchical, recursive_doubling, ring, torus, tree

from .model import Cluster
from .profile import BackendProfile
from .program import compile_schedule
from .simulate import run

_MAKERS: dict[str, Callable[..., Schedule]] = {
    "ring": ring,
    "torus": torus,
    "hierarchical": hierarchical,
    "halving_doubling": halving_doubling,
    "recursive_doubling": recursive_doubling,
    "tree": tree,
}
_BOUNDS = {"message": (1e-7, 1e-1), "message_inside": (1e-7, 1e-1), "network": (1e-3, 1.5), "inside": (1e-3, 1.5)}
SWEEPS = 9


def _with(profile: BackendProfile, name: str, value: float) -> BackendProfile:
    changes: dict[str, Any] = {name: value}
    return replace(profile, **changes)


@dataclass(frozen=True, slots=True)
class Measured:
    """A schedule that was run with buffers of `nbytes`, and the seconds that it took."""

    schedule: Schedule
    nbytes: float
    seconds: float


def read_rows(lines: Iterable[str]) -> list[Measured]:
    """The rows of a bench's JSON lines whose contender names its schedule, as in `phalanx torus(4x2)`."""
    found = []
    for line in lines:
        row = json.loads(line)
        name = re.fullmatch(r"phalanx (\w+)\((\d+(?:x\d+)*)\)", str(row.get("contender", "")))
        if name and name[1] in _MAKERS and "time_us" in row:
            schedule = _MAKERS[name[1]](*(int(size) for size in name[2].split("x")))
            found.append(Measured(schedule, float(row["size"]), float(row["time_us"]) / 1e6))
    return found


def predict(rows: Sequence[Measured], cluster: Cluster, profile: BackendProfile) -> list[float]:
    """Seconds of every row on `cluster`."""
    programs = {row.schedule.name: compile_schedule(row.schedule, cluster, profile) for row in rows}
    return [profile.call + run(programs[row.schedule.name], row.nbytes).seconds for row in rows]


def relative_errors(rows: Sequence[Measured], cluster: Cluster, profile: BackendProfile) -> list[float]:
    """Predicted over measured, less 1, by row."""
    return [predicted / row.seconds - 1 for predicted, row in zip(predict(rows, cluster, profile), rows)]


def fit(rows: Sequence[Measured], cluster: Cluster, start: BackendProfile) -> BackendProfile:
    """`start` with the numbers that explain `rows` best."""
    usable = [row for row in rows if row.schedule.world == cluster.ranks]
    if len(usable) < len(_BOUNDS):
        raise ValueError(
            f"{len(usable)} rows name a schedule of {cluster.ranks} ranks; a fit needs at least {len(_BOUNDS)}:"
            " phalanx bench allreduce --algorithm torus:... --json FILE"
        )

    def loss(profile: BackendProfile) -> float:
        return sum(log(p / row.seconds) ** 2 for p, row in zip(predict(usable, cluster, profile), usable))

    profile, least = start, loss(start)
    for sweep in range(SWEEPS):
        width = 3.0 * 0.6**sweep  # of the search, in logarithms
        for name, (low, high) in _BOUNDS.items():
            middle = max(getattr(profile, name), low)
            for value in np.clip(middle * np.exp(np.linspace(-width, width, 7)), low, high):
                tried = _with(profile, name, float(value))
                found = loss(tried)
                if found < least:
                    profile, least = tried, found
    residual = sqrt(least / max(1, len(usable) - len(_BOUNDS)))
    source = f"fitted to {len(usable)} rows of phalanx bench allreduce on {cluster.name}"
    return replace(profile, name=f"{start.name}, calibrated", residual=residual, source=source)
