"""A rank that lives through many changes of membership uses no more threads and descriptors than before."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from tests.long import times
from tests.world.test_elastic import Job, end_after, stop

pytestmark = pytest.mark.usefixtures("warm_python")

KILLS = times(25, seldom=5)  # two changes each: the death, and the replacement


def used(pid: int) -> tuple[int, int]:
    """Threads and open descriptors of a process now."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def settles(pid: int, at: tuple[int, int]) -> tuple[int, int]:
    """What the process uses, once it is not more than `at`; or after a second, which is no time for a garbage collector."""
    until = time.monotonic() + 1.0
    while (now := used(pid)) > at and time.monotonic() < until:
        time.sleep(0.01)
    return now


def test_an_old_world_gives_its_threads_and_descriptors_back_at_once(tmp_path: Path):
    job = Job(tmp_path, 2, "epochs=100000", "pause=0.002", f"stop_file={tmp_path / 'stop'}", replace=KILLS)
    with contextlib.ExitStack() as stack:
        stack.callback(stop, job)
        job.until(lambda: len(job.pids) == 2)
        job.wait_for_step(2, 2)
        survivor = job.pids[0]
        before = used(survivor)
        for _ in range(KILLS):
            (victim,) = job.pids.keys() - {0}
            job.signal(victim)
            job.until(lambda: len(job.pids) == 2)
            (newcomer,) = job.pids.keys() - {0}
            taking_part = {0, newcomer}
            job.until(
                lambda: any(
                    row["kind"] == "step" and set(row["contributors"]) == taking_part  # noqa: B023
                    for row in job.follow.look()[-40:]
                )
            )
            assert settles(survivor, before) == before, "threads, descriptors"
        end_after(job, taking_part)
