"""Elastic jobs on hosts whose network is cut: exactly one side continues, and the other one comes back as new."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from tests.long import LONG

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from elastic_faults import KINDS, PAUSES, check, cut_once, lose_host
from elastic_hosts import Cuts, fleet
from lab import Bridge, Lab

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
    pytest.mark.skipif(not LONG, reason="PHALANX_TEST_LONG=1 cuts networks"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job whose records are compared after all cuts."""
    place = tmp_path_factory.mktemp("job")
    with Lab(hosts=4, ranks_per_host=1).up(Bridge) as net:
        cuts = Cuts(net)
        with fleet(net, place, "epochs=1000000", "pause=0.05", f"stop_file={place / 'stop'}") as job:
            yield job, cuts


ALL = os.environ.get("PHALANX_TEST_SLOW") == "1"  # ten minutes


@pytest.mark.parametrize("kind", KINDS if ALL else ["3|1", "1|3", "link down"])
def test_one_side_continues(job, kind):
    job, cuts = job
    row = cut_once(job, cuts, kind, random.Random(kind))
    if kind == "flapping":
        assert row["changes"] <= 4, (row, job.words)
        return
    stay = KINDS[kind][1]
    assert row["worlds_at_the_end_of_the_cut"] == (0 if kind in PAUSES else 1), (row, job.words)
    assert not stay or kind in PAUSES or set(row["hosts_that_continue"]) == stay, (row, job.words)
    if kind in PAUSES:
        assert "training pauses until 2 more have come" in job.words
        assert "training continues, with" in job.words
    if kind.startswith("pairwise"):
        assert "is dead" in job.words


def test_a_host_dies_and_comes_back(job):
    job, _ = job
    row = lose_host(job, random.Random(0))
    assert row["seconds_to_next_step"] < 60


def test_there_was_one_lineage_all_the_time(job):
    job, _ = job
    (job.directory / "stop").touch()
    codes = [agent.wait(150) for agent in job.agents.values()]
    assert codes == [0, 0, 0, 0], job.words
    found = check(job.directory)  # raises if a step was made twice
    assert found["weights_equal_after_every_step"]
    assert found["samples_exact"]
