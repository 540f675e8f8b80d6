"""Elastic jobs with real processes: ranks that are killed, stopped, replaced, and a supervisor that ends."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.long import times

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from elastic_kills import Follow, pids, print_stacks  # noqa: E402
from elastic_training import N, replay, rows, steps_of  # noqa: E402

PROGRAM = ROOT / "benchmarks" / "elastic_training.py"
DEADLINE = 90.0

pytestmark = pytest.mark.usefixtures("warm_python")


class Job:
    """A job of `phalanx run` and what its ranks have written."""

    def __init__(
        self, directory: Path, ranks: int, *options: str, replace: int = 0, program: Path = PROGRAM,
        phalanx: tuple[str, ...] = ("-m", "phalanx"), spares: int = 0,
    ) -> None:  # fmt: skip
        self.directory, self.follow, self.dead = directory, Follow(directory), set[int]()
        self.log = directory / "log"
        command = [sys.executable, *phalanx, "run", "--ranks", str(ranks), "--replace", str(replace), "--spares", str(spares)]
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
            assert time.monotonic() < end, f"nothing happens:\n{self.stacks()}"
            assert self.process.poll() is None or happened(), f"the job ended with {self.process.returncode}:\n{self.words}"
            time.sleep(0.005)

    def stacks(self) -> str:
        """The log, after all agents and ranks have printed what their threads do."""
        agents = [agent.pid for agent in getattr(self, "agents", [self.process]) if agent.poll() is None]
        print_stacks([*self.pids.values(), *agents])
        return self.words

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
    used = Counter(i for _, took, _ in steps for ids in took.values() for i in ids)
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


SEEDS = range(times(4, seldom=1))


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


def has_ended(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it vanishes while it is read
        return True


def end_after(job: Job, members: set[int], steps: int = 5) -> None:
    """Let these members make some steps together, then end the job."""

    def made() -> int:
        records = job.follow.look()
        return len({row["step"] for row in records if row["kind"] == "step" and set(row["contributors"]) == members})

    job.until(lambda: made() >= steps)
    (job.directory / "stop").touch()
    assert job.end() == 0, job.words


def epochs_of(job: Job) -> int:
    return max(row["position"] for row in rows(job.directory) if row["kind"] == "epoch")


def test_replacements_join_and_take_part(start, tmp_path):
    job = start(3, "epochs=100000", "pause=0.01", f"stop_file={tmp_path / 'stop'}", replace=2)
    job.until(lambda: len(job.pids) == 3)
    job.wait_for_step(3, 4)
    for victim, newcomer in ((0, 3), (2, 4)):
        job.signal(victim)
        job.until(lambda: newcomer in job.pids)  # noqa: B023
    end_after(job, {1, 3, 4})
    check_exact(job, epochs_of(job))
    joined = {int(member) for line in re.findall(r"members? ([\d, ]+) joined", job.words) for member in line.split(",")}
    assert joined == {3, 4}, job.words


def test_ranks_for_which_there_is_no_room_wait_until_one_dies(start, tmp_path):
    job = start(3, "epochs=100000", "pause=0.01", "most=2", f"stop_file={tmp_path / 'stop'}")
    job.wait_for_step(2, 4)
    assert {row["member"] for row in job.follow.look() if row["kind"] == "step"} == {0, 1}
    job.signal(0)
    end_after(job, {1, 2})
    check_exact(job, epochs_of(job))


@pytest.mark.parametrize("seed", range(times(3, seldom=1)))
@pytest.mark.parametrize("options", [(), ("overlap=yes", "bucket=800")], ids=["at once", "overlapped"])
def test_a_batch_that_the_ranks_cannot_share_evenly_is_still_used_exactly_once(start, seed, options):
    """Overlapped, ranks may be in different backward passes when one dies. They must repeat the step with the same weights."""
    generator = random.Random(seed)
    job = start(4, "epochs=6", "batch=13", "pause=0.01", *options)
    for alive in (4, 3):
        job.until(lambda: len(job.pids) == alive)  # noqa: B023
        job.wait_for_step(alive, 4 * (5 - alive))
        time.sleep(generator.uniform(0, 0.1))
        job.signal(generator.choice(sorted(job.pids)))
    assert job.end() == 0, job.words
    check_exact(job, 6)


def test_the_share_of_a_rank_can_stay_instead(start):
    job = start(4, "epochs=6", "policy=keep_share")
    job.until(lambda: len(job.pids) == 4)
    job.wait_for_step(4, 4)
    job.signal(3)
    assert job.end() == 0, job.words
    check_exact(job, 6, bitwise=False)
    sizes = [sum(len(ids) for ids in took.values()) for _, took, _ in steps_of(rows(job.directory))]
    assert 24 in sizes
    assert 18 in sizes


def test_a_rank_that_stands_still_is_left_behind_and_ends_when_it_wakes(start, tmp_path):
    job = start(3, "epochs=100000", "pause=0.01", f"stop_file={tmp_path / 'stop'}")
    job.until(lambda: len(job.pids) == 3)
    job.wait_for_step(3, 3)
    stopped = job.pids[1]
    job.signal(1, signal.SIGSTOP)
    job.until(lambda: "gave no sign of life" in job.words)
    job.signal(1, signal.SIGCONT)
    job.until(lambda: "member 1 was left behind" in job.words)
    job.until(lambda: has_ended(stopped))
    job.dead.add(1)
    end_after(job, {0, 2})
    check_exact(job, epochs_of(job))


def test_with_too_few_ranks_the_job_ends(start):
    job = start(2, "epochs=100000", "least=2")
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    job.signal(0)
    assert job.end() == 74, job.words
    assert "1 of at least 2 ranks are left" in job.words
    assert "CommunicationError" in job.words


def test_a_signal_to_the_supervisor_ends_everything(start):
    job = start(2, "epochs=100000")
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    pids = job.pids
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143, job.words
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_ranks_end_with_their_supervisor(start):
    job = start(2, "epochs=100000")
    job.until(lambda: len(job.pids) == 2)
    job.wait_for_step(2, 3)
    pids = list(job.pids.values())
    job.process.kill()
    job.process.wait()
    end = time.monotonic() + DEADLINE
    while any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
        assert time.monotonic() < end, job.words
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


RAISES = """
import sys, time, torch, phalanx
comm = phalanx.create_communicator(elastic=True)
for step in range(40):
    total = comm.all_reduce(torch.ones(1)).item()
    if step == 10 and comm.member == 1:
        raise ValueError("a mistake on one rank")
    time.sleep(0.01)
print(f"member {comm.member} ends with {total:.0f} of {comm.size}, {len(comm.membership.history)} epochs")
"""


def test_a_rank_that_raises_prints_its_traceback_and_the_others_continue(start, tmp_path):
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    job = start(3, program=program)
    assert job.end() == 0, job.words
    assert job.words.count("ValueError: a mistake on one rank") == 1
    assert "exited with code 1" in job.words
    assert job.words.count("ends with 2 of 2") == 2
