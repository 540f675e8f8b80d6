"""4 -> 3 -> 2 -> 5 -> 4 ranks within one epoch: each sample once, the same weights as one process, and a loss curve as usual."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.long import LONG
from tests.world.test_elastic import check_exact, rows, stop
from tests.world.test_elastic_hosts import Hosts

import phalanx

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from elastic_training import build, data, steps_of

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(not LONG, reason="PHALANX_TEST_LONG=1, as in CI"),
]
BATCH = 2
SEEDS = 10


class Changing(Hosts):
    """Agents that come one after the other, on one machine."""

    def add(self, ranks: int) -> None:
        self._command[self._command.index("--ranks") + 1] = str(ranks)
        self.start(len(self.agents))


def curve(batches) -> torch.Tensor:
    """The loss on all samples after every step, in one process."""
    model, opt = build()
    x, y, _ = data()
    found = []
    for ids in batches:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        opt.step()
        with torch.no_grad():
            found.append(torch.nn.functional.cross_entropy(model(x), y))
    return torch.stack(found)


def undisturbed(seed: int) -> list[torch.Tensor]:
    with phalanx.data.Loader(data(), None, batch=BATCH, last="keep", workers=0, seed=seed) as loader:
        return [ids for _, _, ids in loader]


def test_4_3_2_5_4_ranks_within_one_epoch(tmp_path):
    slow = tmp_path / "slow"
    slow.touch()
    job = Changing(tmp_path, 1, 4, f"batch={BATCH}", "epochs=1", "stop_file=/nonexistent", f"slow_file={slow}", by_hand=True)
    try:

        def until_size(size: int) -> None:
            job.until(lambda: any(r["kind"] == "step" and len(r["contributors"]) == size for r in job.follow.look()[-40:]))

        until_size(4)
        job.signal(1)
        until_size(3)
        job.signal(0)
        until_size(2)
        job.add(3)
        until_size(5)
        job.signal(max(job.pids))
        until_size(4)
        slow.unlink()
        assert job.end() == 0, job.words
        check_exact(job, 1)  # the multiset of samples, and the same bits as one process
        steps = steps_of(rows(tmp_path))
        called: dict[int, set[int]] = {}
        for row in rows(tmp_path):
            if row["kind"] == "hook":
                called.setdefault(row["epoch"], set()).add(row["step"])
        assert len(called) >= 4, "hooks were called for every change"
        assert all(len(at) == 1 for at in called.values()), called  # before the same step on all ranks
        shape = [len(who) for who, _, _ in steps]
        changes = [n for i, n in enumerate(shape) if i == 0 or shape[i - 1] != n]
        assert changes[:3] == [4, 3, 2]
        assert changes[changes.index(5) :] == [5, 4]  # the new ones may come one after the other: 2, 3, 4, 5
    finally:
        stop(job)
        for agent in job.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
    own = curve([torch.tensor([i for ids in took.values() for i in ids]) for _, took, _ in steps])
    others = torch.stack([curve(undisturbed(seed))[-1] for seed in range(SEEDS)])  # the noise: other orders of the same samples
    assert abs(float(own[-1]) - float(others.mean())) <= 4 * float(others.std()), (own[-1], others)
    same_order = curve(undisturbed(0))
    common = min(len(own), len(same_order))
    assert float((own[:common] - same_order[:common]).abs().max()) <= 4 * float(others.std()) + 0.05
