"""Ranks that are killed at random moments: the others name them, soon, and nothing of the memory remains."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.world.pool import Pool, WorldError

from phalanx.native import core, meeting
from phalanx.native.errors import RankDied, SharedMemoryError
from phalanx.native.team import HostTeam

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")

TIMEOUT = 20.0  # of the team: whoever names the dead much sooner saw the process, not the clock


def work_until_somebody_dies(comm, directory: str, method: int) -> None:
    """Collectives of all kinds without end; how it ended goes to a file, because the world of a killed rank has no results."""
    meeting.METHODS = (method,)
    store = dist.PrefixStore("death", dist.distributed_c10d._get_default_store())
    team = HostTeam.join(store, comm.rank, comm.size, timeout=TIMEOUT, name="t")
    assert team is not None
    try:
        while True:
            flat = team.allocate(4 << 20)
            own = torch.ones(300_000)
            Path(directory, f"at_work{comm.rank}").touch()
            for _ in range(20):
                team.all_reduce(flat.view(torch.float32))
                team.all_reduce(own, "max")
                team.broadcast(own, 0)
                team.all_reduce(flat[:64].view(torch.float32))
            team.release(flat)
    except SharedMemoryError as error:
        story = {"kind": type(error).__name__, "dead": error.dead, "late": error.late, "at": time.time()}
        Path(directory, f"{comm.rank}.json").write_text(json.dumps(story))


@pytest.mark.parametrize("method", [0, 1], ids=["memfd", "named"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_killed_rank_is_named_by_the_others(tmp_path, size, method):
    dice = random.Random()  # no seed: other moments in every run
    pool = Pool(size)
    pool.run(len_of_world)  # started
    pids = pool.pids
    victim = dice.randrange(size)
    killed: list[float] = []

    def kill() -> None:
        while not (tmp_path / f"at_work{victim}").exists():
            time.sleep(0.01)
        time.sleep(dice.random() * 0.3)
        os.kill(pids[victim], signal.SIGKILL)
        killed.append(time.time())

    assassin = threading.Thread(target=kill)
    assassin.start()
    try:
        with pytest.raises(WorldError, match=f"rank {victim} of {size}"):
            pool.run(work_until_somebody_dies, str(tmp_path), method)
    finally:
        assassin.join()
        pool.kill()
    stories = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size) if rank != victim}
    for rank, story in stories.items():
        assert (story["kind"], story["dead"]) == (RankDied.__name__, [victim]), (rank, story)
        assert story["at"] - killed[0] < TIMEOUT / 2
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"phalanx-{pid}-" for pid in pids))]


def len_of_world(comm) -> int:
    return comm.size


def stop_in_the_middle(comm, directory: str) -> None:
    """Rank 1 is stopped, not dead: only the deadline can tell."""
    store = dist.PrefixStore("stopped", dist.distributed_c10d._get_default_store())
    team = HostTeam.join(store, comm.rank, comm.size, timeout=1.0, name="t")
    assert team is not None
    team.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # for good: the pool kills it
        return
    try:
        team.barrier()
    except SharedMemoryError as error:
        Path(directory, f"{comm.rank}.json").write_text(json.dumps({"kind": type(error).__name__, "late": error.late}))


def test_a_stopped_rank_is_late_not_dead(tmp_path):
    pool = Pool(3)
    pool.run(len_of_world)  # started
    stopped = pool.pids[1]

    def end_it() -> None:
        """When the others have told their stories: the pool would wait for it until its deadline."""
        until = time.monotonic() + 20
        while time.monotonic() < until and not all((tmp_path / f"{rank}.json").exists() for rank in (0, 2)):
            time.sleep(0.02)
        os.kill(stopped, signal.SIGKILL)

    ending = threading.Thread(target=end_it)
    ending.start()
    try:
        with pytest.raises(WorldError):
            pool.run(stop_in_the_middle, str(tmp_path))
    finally:
        ending.join()
        pool.kill()
    for rank in (0, 2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"kind": "RankLate", "late": [1]}
