"""A backend's profile, fitted to rows of `phalanx bench allreduce`: how long the library really takes on this machine.

The fit finds five numbers, each within wide bounds: seconds to start, seconds per message between hosts and inside a host, and
the parts of both bandwidths that are reached. It minimises the squared relative errors (of logarithms, so that 4 KiB counts as
much as 64 MiB). It first searches along one number at a time. The remaining error is the profile's `residual`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.schedule import Schedule, halving_doubling, hierarchical, recursive_doubling, ring, torus, tree
from phalanx.schedule.limits import MAX_RANKS
from phalanx.schedule.plain_json import brief, loads

from .machine import Cluster
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
BOUNDS = {
    "start": (1e-6, 1e-1),
    "message": (1e-7, 1e-1),
    "message_inside": (1e-7, 1e-1),
    "network": (1e-3, 1.5),
    "inside": (1e-3, 1.5),
}
SWEEPS, POLISH = 4, 12  # searches along each number in turn; then Levenberg-Marquardt steps
NUDGE = 1e-3  # change of a number's logarithm, to measure its effect
LARGEST = 1e18  # bytes, or microseconds
MOST = 1 << 20  # ranks of all schedules in the rows together
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """A schedule that ran with buffers of `nbytes`, and the seconds that it took."""

    schedule: Schedule
    nbytes: float
    seconds: float


def read_rows(lines: Iterable[str]) -> list[Measured]:
    """The rows of a bench's JSON lines whose contender names its schedule, as in `phalanx torus(4x2)`."""
    found = []
    made: dict[str, Schedule] = {}
    ranks = 0
    for number, line in enumerate(lines, 1):
        try:
            row = loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a row of `phalanx bench allreduce --json`: {line[:60]!r}")
        contender = row.get("contender")
        name = (
            re.fullmatch(r"phalanx (\w+)\((\d{1,18}(?:x\d{1,18}){0,9})\)", contender, re.ASCII)
            if isinstance(contender, str)
            else None
        )
        if name and name[1] in _MAKERS and "time_us" in row:
            if name[0] not in made:
                made[name[0]] = _make(name[1], name[2], number)
                ranks += made[name[0]].world
            if ranks > MOST:
                raise ValueError(f"line {number} of the rows: the schedules have more than {MOST} ranks together; split the file")
            schedule = made[name[0]]
            nbytes, seconds = (_positive(row, key, number) for key in ("size", "time_us"))
            found.append(Measured(schedule, nbytes, seconds / 1e6))
    return found


def _make(name: str, sizes: str, number: int) -> Schedule:
    """The schedule of a row. Raises if it is larger than any that was ever measured."""
    numbers = [int(size) for size in sizes.split("x")]
    if (ranks := prod(numbers)) > MAX_RANKS:
        raise ValueError(f"line {number} of the rows: {name}({sizes[:40]}) has {ranks:.4g} ranks; at most {MAX_RANKS}")
    try:
        return _MAKERS[name](*numbers)
    except (ValueError, TypeError) as error:
        raise ValueError(f"line {number} of the rows: {name}({sizes[:40]}) is not a schedule: {error}") from None


def _positive(row: dict[str, Any], key: str, number: int) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:
        raise ValueError(f"line {number} of the rows: {key} is {brief(value)}; give a number above 0")
    return float(value)


def predict(rows: Sequence[Measured], cluster: Cluster, profile: BackendProfile) -> list[float]:
    """Predicted seconds of every row on `cluster`."""
    programs = {row.schedule.name: compile_schedule(row.schedule, cluster, profile) for row in rows}
    return [run(programs[row.schedule.name], row.nbytes).seconds for row in rows]


def fit(rows: Sequence[Measured], cluster: Cluster, start: BackendProfile) -> BackendProfile:
    """`start` with the numbers that explain `rows` best."""
    usable = [row for row in rows if row.schedule.world == cluster.ranks]
    if len(usable) < len(BOUNDS):
        raise ValueError(
            f"{len(usable)} rows name a schedule of {cluster.ranks} ranks; a fit needs at least {len(BOUNDS)}:"
            " phalanx bench allreduce --algorithm torus:... --json FILE"
        )

    measured = [row.seconds for row in usable]
    profile, residual = fit_any(start, lambda profile: predict(usable, cluster, profile), measured)
    source = f"fitted to {len(usable)} rows of phalanx bench allreduce on {cluster.name}"
    return replace(profile, name=f"{start.name}, calibrated", residual=residual, source=source)


def fit_any(
    start: BackendProfile,
    predict: Callable[[BackendProfile], Sequence[float]],
    measured: Sequence[float],
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
) -> tuple[BackendProfile, float]:
    """`start` with the numbers that bring `predict` nearest to `measured`, and the remaining relative error (one sigma).

    `bounds` has the fields to fit, each with its smallest and its largest value.
    """

    def misses(profile: BackendProfile) -> Floats:
        return np.asarray(np.log(np.array(predict(profile)) / np.array(measured)))

    profile, left = start, misses(start)
    for sweep in range(SWEEPS):
        width = 3.0 * 0.6**sweep  # of the search, in logarithms
        for name, (low, high) in bounds.items():
            middle = max(getattr(profile, name), low)
            for value in np.clip(middle * np.exp(np.linspace(-width, width, 7)), low, high):
                tried = _with(profile, {name: float(value)})
                found = misses(tried)
                if found @ found < left @ left:
                    profile, left = tried, found
    damping = 1e-2
    for _ in range(POLISH):
        slopes = np.stack([misses(_moved(profile, {name: NUDGE}, bounds)) - left for name in bounds], axis=1) / NUDGE
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(bounds))), -slopes.T @ left)
        tried = _moved(profile, dict(zip(bounds, np.clip(step, -1, 1))), bounds)
        found = misses(tried)
        if found @ found < left @ left:
            profile, left, damping = tried, found, damping / 5
        else:
            damping *= 10
    return profile, sqrt(float(left @ left) / max(1, len(measured) - len(bounds)))


def _moved(profile: BackendProfile, by: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> BackendProfile:
    """`profile` with some numbers multiplied by e to the power of `by`, within their bounds."""
    values = {name: getattr(profile, name) * exp(power) for name, power in by.items()}
    return _with(profile, {name: min(max(value, bounds[name][0]), bounds[name][1]) for name, value in values.items()})


def _with(profile: BackendProfile, values: Mapping[str, float]) -> BackendProfile:
    changes: dict[str, Any] = dict(values)
    return replace(profile, **changes)
