"""The algorithm of a group: from `pg_options`, from PHALANX_ALGORITHM, or chosen for the hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phalanx.backend.registration import Options
from phalanx.comm.arguments import check_all_reduce
from phalanx.schedule import Schedule
from phalanx.schedule.names import InputError, find_all_reduce, find_schedule

ALGORITHM = "PHALANX_ALGORITHM"


def algorithm_of(options: Any, size: int, *, whole_world: bool, environ: Mapping[str, str] = os.environ) -> Schedule | None:
    """The schedule that you chose for a group of `size` ranks, or None.

    A schedule is for one number of ranks. PHALANX_ALGORITHM must fit the default group, and applies to others of its size.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be phalanx.backend.Options(algorithm=...), got {type(options).__name__}")
    if options is not None and options.algorithm is not None:
        return _checked(options.algorithm, size)
    text = environ.get(ALGORITHM)
    if not text:
        return None
    if not whole_world and find_schedule(text).world != size:
        return None
    try:
        return find_all_reduce(text, size, f"{ALGORITHM}={text}")
    except InputError as error:
        raise ValueError(f"{ALGORITHM}: {error}") from None


def _checked(algorithm: Schedule, size: int) -> Schedule:
    if not isinstance(algorithm, Schedule):
        raise TypeError(f"algorithm must be a Schedule such as phalanx.torus(2, 4), got {type(algorithm).__name__}")
    check_all_reduce(algorithm, size, "this group")
    return algorithm
