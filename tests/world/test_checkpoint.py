"""Checkpoints of real processes: killed at random moments, resumed bit for bit, on other world sizes, on a disk that fails."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe

import numpy
import pytest
import torch
from tests.long import times
from tests.world.conftest import ONLY
from tests.world.programs.herd import ROOT, clean_environment

import phalanx
from phalanx.train.checkpoint import CheckpointError, RandomState
from phalanx.train.sigterm import StopRequest

KILLS = times(36, seldom=14)
KILL_DEADLINE = 20.0  # seconds for a saving process to begin
RANKS = 2


@pytest.fixture(params=[ONLY] if ONLY else [2, 3], ids=lambda n: f"{n}-ranks")
def world(request, pools):
    return pools.of(request.param)


# ---- kill -9 ------------------------------------------------------------------------------------------------------------------


def content(step, rank):
    """A state that is a function of the step: whatever is loaded can be checked against the step that it claims."""
    return torch.arange(2000, dtype=torch.float64) * step + 0.25 * rank, {"step": step, "text": "x" * (step % 50), "rank": rank}


def save_for_ever(directory, descriptor):
    """Goes on from what is there, with a save in every step, until somebody ends it."""
    connection = Connection(int(descriptor))

    def play(comm):
        x, data = content(0, comm.rank)
        checkpoints = phalanx.Checkpointer(directory, comm, keep=2)
        step = checkpoints.load(x=x, data=data) or 0
        if comm.rank == 0:
            connection.send(step)
        while True:
            step += 1
            fresh, changed = content(step, comm.rank)
            x.copy_(fresh)
            data.clear()
            data.update(changed)
            checkpoints.save(step, x=x, data=data)

    phalanx.run_local(RANKS, play)


def load_and_compare(directory):
    """The step that all ranks find; its content is exactly that of this step."""

    def play(comm):
        x, data = torch.zeros(2000, dtype=torch.float64), {}
        with phalanx.Checkpointer(directory, comm) as checkpoints:
            step = checkpoints.load(x=x, data=data)
        if step is not None:
            wanted, changed = content(step, comm.rank)
            assert torch.equal(x, wanted)
            assert data == changed
        return step

    (step,) = set(phalanx.run_local(RANKS, play))
    return step


@pytest.mark.usefixtures("warm_python")
@pytest.mark.filterwarnings("error::RuntimeWarning")  # a damaged checkpoint would be told: there must be none
def test_killed_at_any_moment(tmp_path):
    saving = "import sys; from tests.world import test_checkpoint; test_checkpoint.save_for_ever(*sys.argv[1:])"
    rng, seen, leftovers = random.Random(7), [0], 0
    for number in range(3 * KILLS):
        if number >= KILLS and seen[-1] > 10:  # a busy machine saves less between two kills
            break
        mine, theirs = Pipe()
        command = [sys.executable, "-c", saving, str(tmp_path), str(theirs.fileno())]
        process = subprocess.Popen(command, env=clean_environment(), cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            assert mine.poll(KILL_DEADLINE), "the saving process did not begin"
            assert mine.recv() == seen[-1]  # it resumed from what we saw
            time.sleep(rng.uniform(0.0, 0.12))
        finally:
            process.kill()
            process.wait(10)
            mine.close()
        seen.append(load_and_compare(tmp_path) or 0)
        assert seen[-1] >= seen[-2]
        leftovers += any(".tmp-" in name for name in os.listdir(tmp_path))
    assert seen[-1] > 10  # old ones were deleted meanwhile
    assert leftovers > KILLS / 4  # and it was killed in the middle of a save
    complete = [name for name in os.listdir(tmp_path) if ".tmp-" not in name and name != ".lock"]
    assert len(complete) <= 3  # two, and one more where it was killed before the oldest went


# ---- resume -------------------------------------------------------------------------------------------------------------------


class Training:
    """Data-parallel, with statistics and random streams that every rank has for itself."""

    def __init__(self, comm):
        phalanx.seed_everything(1)
        self.comm = comm
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)
        )
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = phalanx.create_multi_node_optimizer(inner, comm)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        phalanx.seed_everything(100 + comm.rank)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rng": RandomState()}

    def step(self):
        self.optimizer.zero_grad()
        x = torch.randn(6, 8) + random.random() + numpy.random.rand()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def bits(self):
        states = [self.model.state_dict(), *self.optimizer.state_dict()["state"].values()]
        return [x.tolist() for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def train(comm, directory, first, last, save_at):
    """Steps `first` to `last`; a run that does not begin at 0 begins with a load, after steps that must leave no trace."""
    training = Training(comm)
    with phalanx.Checkpointer(directory, comm) as checkpoints:
        if first:
            training.step()
            assert checkpoints.load(**training.state) == first
        for step in range(first + 1, last + 1):
            training.step()
            if step == save_at:
                checkpoints.save(step, **training.state)
    return training.bits()


def test_resumed_ranks_continue_bit_for_bit(world, tmp_path):
    whole = world.run(train, tmp_path, 0, 8, 4)
    assert world.run(train, tmp_path, 4, 8, None) == whole
    assert world.run(train, tmp_path, 4, 7, None) != whole


def load_elsewhere(comm, directory):
    """The replica, as every rank of a new world finds it, and what it draws next."""
    training = Training(comm)
    with phalanx.Checkpointer(directory, comm) as checkpoints:
        step = checkpoints.load(**training.state)
    parameters = [p.tolist() for p in training.model.parameters()]
    return step, parameters, float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_another_world_size(pools, tmp_path):
    if ONLY:
        pytest.skip("needs two world sizes")
    saved = pools.of(2).run(train, tmp_path, 0, 4, 4)
    found = pools.of(3).run(load_elsewhere, tmp_path)
    assert [step for step, *_ in found] == [4, 4, 4]
    assert all(parameters[0] == saved[0][0] for _, parameters, *_ in found)  # the first weight; replicas are equal
    for streams in list(zip(*found, strict=True))[2:]:
        assert len(set(streams)) == 3  # nobody draws what another rank draws
    assert pools.of(3).run(load_elsewhere, tmp_path) == found


# ---- failures and signals -----------------------------------------------------------------------------------------------------


def disk_of_one_rank_fails(comm, directory):
    own = torch.full((1 << 18,), float(comm.rank))  # 1 MiB, different on all ranks
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with phalanx.Checkpointer(directory, comm) as checkpoints:
        checkpoints.save(1, x=own)
        checkpoints.load(x=own)
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            checkpoints.save(2, x=own)
            with pytest.raises(CheckpointError, match=r"File too large|rank 1 could not write its part"):
                checkpoints.save(3, x=own)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        listed = sorted(set(os.listdir(directory)) - {".lock"}) if comm.rank == 0 else None
        checkpoints.save(3, x=own)
    return listed


def test_the_disk_of_one_rank_fails(pair, tmp_path):
    assert pair.run(disk_of_one_rank_fails, tmp_path)[0] == ["step-000000001"]
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000003"]


def stop_at_a_signal(comm):
    steps = 0
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(comm) as stop:
        while not stop.agreed():
            steps += 1
            if steps == 3 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    return steps


def test_sigterm_at_one_rank_stops_all_at_the_same_step(world):
    assert world.run(stop_at_a_signal) == [3] * world.size


def evaluate_shards(comm, samples):
    """Every rank but the last takes half of what is left, rank 0 the rest as well; the last has nothing."""
    left, shards = list(samples), []
    for _ in range(comm.size - 1):
        half = (len(left) + 1) // 2
        shards.append(left[:half])
        left = left[half:]
    shards.append([])
    shards[0] = shards[0] + left
    shard = shards[comm.rank]
    evaluate = phalanx.create_multi_node_evaluator(lambda: {"mean": (sum(shard), len(shard))}, comm)
    return evaluate()["mean"]


def test_evaluation_is_exact(world):
    samples = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    assert world.run(evaluate_shards, samples) == [sum(samples) / len(samples)] * world.size
