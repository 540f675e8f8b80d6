"""init_process_group("phalanx"): which rank is missing is said in time, and nothing is left when the group is destroyed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import only_long

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("warm_python")


def play(name, place, size=2):
    """What every rank printed, in rank order; None of a rank that ended before."""
    program = str(Path(__file__).with_name("rank.py"))
    ranks = [
        subprocess.Popen([sys.executable, program, name, str(place), str(rank), str(size)], stdout=subprocess.PIPE, cwd=ROOT)
        for rank in range(size)
    ]
    said = []
    for rank in ranks:
        try:
            said.append(rank.communicate(timeout=120)[0])
        finally:
            rank.kill()
    return [json.loads(each.decode().splitlines()[-1]) if each.strip() else None for each in said]


def test_a_rank_that_died_is_named(tmp_path):
    errors = play("dies", tmp_path)[0]
    waited, future, again, barrier = errors
    assert waited["type"] == "CommunicationError"
    assert (waited["missing"], "rank 1 ended or left" in waited["words"]) == ([1], True)
    assert waited["seconds"] < 30  # the timeout is 60 s
    assert "rank 1 ended or left" in future["words"]
    for later in (again, barrier):
        assert "cannot start: an earlier communication failed" in later["words"]
        assert later["missing"] == [1]


@only_long
def test_a_rank_that_is_late_is_named(tmp_path):
    error = play("is_late", tmp_path)[0][0]
    assert error["missing"] == [1]
    assert "all_reduce(float32[1], sum): Timed out waiting for rank 1" in error["words"]


def test_a_rank_that_never_comes_is_named(tmp_path):
    error = play("never_comes", tmp_path)[0][0]
    assert error["missing"] == [1]
    assert "init_process_group: rank 1 did not come within 2 s" in error["words"]


def test_groups_leave_no_thread_and_no_memory(tmp_path):
    for backends, threads, files in play("ends", tmp_path):
        assert [each[0] for each in backends] == ["phalanx", "cpu:phalanx,cuda:nccl", "phalanx"]
        assert [each[2] for each in backends] == [2.0] * 3
        assert (threads, files) == ([], [])
