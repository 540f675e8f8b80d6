"""Elastic jobs with real processes: ranks that are killed, stopped, replaced, and a supervisor that ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from elastic_kills import Follow, pids  # noqa: E402
from elastic_training import N, replay, rows, steps_of  # noqa: E402

PROGRAM = ROOT / "benchmarks" / "elastic_training.py"
DEADLINE = 90.0

pytestmark = pytest.mark.usefixtures("warm_python")


class Job:
    """A job of `phalanx run` and what its ranks have written."""

    def __init__(self, directory: Path, ranks: int, *options: str, replace: int = 0, program: Path = PROGRAM) -> None:
        self.directory, self.follow, self.dead = directory, Follow(directory), set[int]()
        self.log = directory / "log"
        command = [sys.executable, "-m", "phalanx", "run", "--ranks", str(ranks), "--replace", str(replace)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(program), str(directory), *options],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
            )

    @property
    def words(self) -> str:
        return self.log.read_text()

    @property
    def pids(self) -> dict[int, int]:
        return pids(self.follow.look(), self.dead)

    def wait_for_step(self, members: int, step: int) -> None:
        """Until this many members have finished this step."""
        self.until(lambda: self.finished(step) >= members)

    def finished(self, step: int) -> int:
        return len({row["member"] for row in self.follow.look() if row["kind"] == "step" and row["step"] >= step})

    def until(self, happened) -> None:
        end = time.monotonic() + DEADLINE
        while not happened():
            assert time.monotonic() < end, f"nothing happens:\n{self.words}"
            assert self.process.poll() is None or happened(), f"the job ended with {self.process.returncode}:\n{self.words}"
            time.sleep(0.005)

    def signal(self, member: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[member], number)
        if number == signal.SIGKILL:
            self.dead.add(member)

    def end(self) -> int:
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.words}") from None


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            job = Job(tmp_path, *arguments, **options)
            stack.callback(stop, job)
            return job

        yield start


def stop(job: Job) -> None:
    if job.process.poll() is None:
        job.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(35)
    for pid in job.pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    job.process.kill()
    job.process.wait()


def check_exact(job: Job, epochs: int, *, bitwise: bool = True) -> None:
    """All ranks have the same weights, those of one process with the same steps, and every sample was trained once per epoch."""
    records = rows(job.directory)
    steps = steps_of(records)
    used = Counter(i for _, took in steps for ids in took.values() for i in ids)
    assert used == dict.fromkeys(range(N), epochs), f"{job.words}\n{Counter(used.values())}"
    ends = {row["weights"] for row in records if row["kind"] == "end"}
    assert len(ends) == 1, job.words
    if bitwise:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert ends == {replay(steps)}
        finally:
            torch.set_num_threads(threads)


SEEDS = range(int(os.environ.get("PHALANX_TEST_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [(), ("overlap=yes", "bucket=800")], ids=["at once", "overlapped"])
def test_survivors_of_kills_at_random_moments_lose_nothing(start, seed, options):
    generator = random.Random(seed)
    epochs = 12
    job = start(4, f"epochs={epochs}", "pause=0.01", *options)
    for alive in (4, 3, 2):
        job.until(lambda: len(job.pids) == alive)  # noqa: B023
        job.wait_for_step(alive, 3 * (5 - alive))
        time.sleep(generator.uniform(0, 0.1))
        victim = generator.choice(sorted(job.pids)) if alive < 4 or seed else 0
        at = max(row["step"] for row in job.follow.look() if row["kind"] == "step")
        job.signal(victim)
        survivors = set(job.pids)
        job.until(
            lambda: any(
                row["kind"] == "step" and row["step"] > at + 1 and set(row["contributors"]) == survivors  # noqa: B023
                for row in job.follow.look()
            )
        )
    assert job.end() == 0, job.words
    assert job.words.count("was killed by signal 9") == 3
    check_exact(job, epochs)
