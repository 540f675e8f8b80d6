"""Double buffering, gossip and local steps with elastic=True: ranks of `phalanx run` are killed, and replaced."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from tests.long import often, only_long, times
from tests.world.test_elastic import Job, end_after, epochs_of, start  # noqa: F401  a fixture
from tests.world.test_elastic_train import accuracy, check_rows, train

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from elastic_training import N, build, data, replay, rows, steps_of, uses  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_python")

LOCAL = ("sync=local:5", *often("sync=diloco:6", "sync=noloco:6"))
GOSSIP = ("sync=gossip", *often("sync=gossip:waiting", "sync=gossip:gradients"))


def check_samples(job: Job, epochs: int) -> None:
    """Every sample was trained exactly once per epoch, by a rank whose work reached the others."""
    used = uses(rows(job.directory))
    assert used == dict.fromkeys(range(N), epochs), job.words


def check_ends(job: Job) -> None:
    """All ranks have made equally many steps, and ended with the same bits: those of a network that has learned something."""
    ends = [row for row in rows(job.directory) if row["kind"] == "end"]
    assert len({(row["steps"], row["weights"], row["loss"]) for row in ends}) == 1, job.words
    model, _ = build()
    x, y, _ = data()
    assert ends[0]["loss"] < torch.nn.functional.cross_entropy(model(x), y).item(), job.words
    assert math.isfinite(ends[0]["loss"])


def replicas(job: Job, kind: str, at: str) -> list[int]:
    """The number of different replicas at the same moment, for each moment."""
    seen: dict[int, set[str]] = {}
    for row in rows(job.directory):
        if row["kind"] == kind:
            seen.setdefault(row[at], set()).add(row["weights"])
    return [len(weights) for weights in seen.values()]


def check_replicas(job: Job, mode: str) -> None:
    """With double buffering they are equal after every step, with local steps after an outer one, as at the end of an epoch."""
    if mode == "delayed=1":
        assert set(replicas(job, "step", "step")) == {1}
    elif mode in LOCAL and "noloco" not in mode:
        assert set(replicas(job, "epoch", "position")) == {1}
        assert max(replicas(job, "step", "step")) > 1, "the steps were local"
    else:
        assert max(replicas(job, "step", "step")) > 1, "the replicas differ"


@pytest.mark.parametrize("mode", ["delayed=1", *GOSSIP, *LOCAL])
def test_a_killed_rank_is_replaced(start, tmp_path, mode):  # noqa: F811
    job = start(3, "epochs=100000", mode, f"stop_file={tmp_path / 'stop'}", replace=1)
    job.until(lambda: len(job.pids) == 3)
    job.wait_for_step(3, 7)
    job.signal(0)
    job.until(lambda: 3 in job.pids)
    end_after(job, {1, 2, 3})
    assert "member 0 was killed by signal 9" in job.words
    assert "member 3 joined" in job.words
    check_samples(job, epochs_of(job))
    check_ends(job)
    check_replicas(job, mode)


@pytest.mark.parametrize("seed", range(times(4, seldom=1)))
def test_double_buffering_after_deaths_equals_one_process(start, seed):  # noqa: F811
    job = start(4, "epochs=8", "delayed=1", "pause=0.01")
    job.until(lambda: len(job.pids) == 4)
    for victim, step in ((seed % 4, 4), ((seed + 1) % 4, 11 + seed)):
        job.wait_for_step(len(job.pids), step)
        job.signal(victim)
    assert job.end() == 0, job.words
    check_samples(job, 8)
    check_replicas(job, "delayed=1")
    steps = steps_of(rows(job.directory), delayed=True)
    assert {len(who) for who, _, _ in steps} >= {4, 2}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert {row["weights"] for row in rows(job.directory) if row["kind"] == "end"} == {replay(steps, delayed=True)}
    finally:
        torch.set_num_threads(threads)


@only_long
@pytest.mark.parametrize("mode", ["delayed=1", *GOSSIP, *LOCAL])
def test_a_batch_that_cannot_be_shared_evenly(start, tmp_path, mode):  # noqa: F811
    job = start(4, "epochs=6", "batch=13", mode)
    job.until(lambda: len(job.pids) == 4)
    job.wait_for_step(4, 4)
    job.signal(1)
    assert job.end() == 0, job.words
    check_samples(job, 6)
    check_ends(job)


@pytest.mark.parametrize(
    "settings",
    [
        ("comm.sync=gossip",),
        *often(("comm.double_buffering=true",), ("comm.sync=local-sgd", "comm.local.every=3"), ("comm.sync=diloco",)),
    ],
    ids=lambda settings: settings[0],
)
def test_a_run_of_phalanx_train_survives_rank_0_and_takes_a_replacement(tmp_path, settings):
    options = [word for setting in settings for word in ("--set", setting)]
    done = train(
        tmp_path, "--replace", "1", "--set", "comm.min_ranks=3", "--set", "keep=100", *options, epochs=4, training="0:21"
    )
    assert done.returncode == 0, done.stdout
    found = check_rows(tmp_path, 4, 10, extra=3)
    changes = [row for row in found if row["kind"] == "membership"]
    assert [who for row in changes for who, _ in row["left"]] == [0], done.stdout
    assert [who for row in changes for who in row["joined"]] == [3], done.stdout
    assert found[-1]["top1"] > 0.9
    last = [row for row in found if row["kind"] == "evaluation"][-1]
    (saved,) = (tmp_path / "run" / "checkpoints").glob(f"step-{last['step']:09}*")
    assert last["top1"] == accuracy(saved), done.stdout
