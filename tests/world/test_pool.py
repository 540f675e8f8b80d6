"""The pool itself: what it reports when a rank raises, dies or hangs, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.warm.popen import Python, warm
from tests.world.conftest import ONLY
from tests.world.pool import Pool, WorldError

SIZE = ONLY or 2


@pytest.fixture
def own():
    """A pool that this test may break."""
    pool = Pool(SIZE)
    yield pool
    pool.kill()


def place(comm, *args):
    return comm.rank, comm.size, args


def raise_on_last(comm):
    if comm.rank == comm.size - 1:
        raise KeyError(f"only rank {comm.rank}")
    comm.barrier()


def end_on_last(comm):
    if comm.rank == comm.size - 1:
        print("about to end", flush=True)
        os._exit(7)
    comm.barrier()


def sleep_on_last(comm):
    if comm.rank == comm.size - 1:
        stand_still()
    comm.barrier()


def stand_still():
    time.sleep(600)


def assert_wrong(comm):
    left, right = (comm.rank, "left"), (comm.rank, "right")
    assert left == right


def gone(pids):
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_results_come_in_rank_order_from_the_same_processes(world):
    assert world.run(place, 1, "a") == [(rank, world.size, (1, "a")) for rank in range(world.size)]
    first = world.pids
    world.run(place)
    assert world.pids == first
    assert len(set(first)) == world.size


def test_an_exception_has_the_traceback_of_its_rank_and_the_next_run_works(own):
    last = SIZE - 1
    with pytest.raises(WorldError, match=f"rank {last} of {SIZE}:\n(.|\n)*raise_on_last(.|\n)*KeyError: 'only rank {last}'"):
        own.run(raise_on_last)
    assert [rank for rank, _, _ in own.run(place)] == list(range(SIZE))


def test_a_failed_assertion_shows_its_two_sides(own):
    with pytest.raises(WorldError, match=r"left = \(0, 'left'\)"):
        own.run(assert_wrong)


def test_a_death_is_reported_with_exit_code_and_last_words(own):
    with pytest.raises(WorldError, match=f"rank {SIZE - 1} of {SIZE}:\nits process ended with exit code 7(.|\n)*about to end"):
        own.run(end_on_last)
    assert own.run(place)


def test_a_deadline_prints_all_stacks_of_all_ranks_and_kills_them(own):
    own.run(place)
    pids = own.pids
    with pytest.raises(WorldError, match="did not finish") as caught:
        own.run(sleep_on_last, deadline=1.0)
    text = str(caught.value)
    assert all(f"---- rank {rank} of {SIZE}" in text for rank in range(SIZE))
    assert "stand_still" in text.split(f"---- rank {SIZE - 1} of {SIZE}")[1]
    assert SIZE == 1 or "barrier" in text.split("---- rank 0 of")[1]
    assert gone(pids)
    assert own.run(place)


class Asking(Python):
    """Starts other programs, as pytest does."""

    launches = True


def test_nothing_outlives_a_pytest_that_is_killed_or_interrupted():
    program = (
        "from tests.world.pool import Pool\n"
        "from tests.world.test_pool import place, sleep_on_last\n"
        f"pool = Pool({SIZE})\n"
        "pool.run(place)\n"
        "print(*pool.pids, flush=True)\n"
        "pool.run(sleep_on_last)\n"
    )
    root = Path(__file__).parents[2]
    warm()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    started = [
        Asking([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=root)
        for _ in range(2)
    ]
    try:
        for process, how in zip(started, (signal.SIGKILL, signal.SIGINT), strict=True):
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == SIZE
            time.sleep(0.2)
            process.send_signal(how)
            process.wait(20)
            assert gone(pids)
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
