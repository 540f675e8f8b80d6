"""What the reports of a job with a killed rank say about it; the job itself runs in tests/cli/test_selftest.py."""

import pytest

from phalanx.comm.launch import discover
from phalanx.selftest.failure import clean_environment, judge
from phalanx.selftest.result import Status
from phalanx.selftest.victim import TIMEOUT, VICTIM

GOOD = {
    0: {"rank": 0, "at": 11.0, "missing": [VICTIM], "message": "rank 1 is gone"},
    1: {"rank": 1, "killed": 10.0},
    2: {"rank": 2, "at": 10.5, "missing": [VICTIM], "message": "rank 1 is gone"},
}


def test_all_named_it_in_time():
    found = judge(GOOD, 3, 8.0)
    assert found.status is Status.PASS
    assert found.reason == "rank 0 and rank 2 named the killed rank 1 within 1.0 s"
    assert found.figures["seconds"] == {"0": 1.0, "2": 0.5}


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({rank: GOOD[rank] for rank in (0, 1)}, "rank 2 did not notice"),
        (GOOD | {2: GOOD[2] | {"missing": [0]}}, "rank 2 named [0]: rank 1 is gone"),
        (GOOD | {0: GOOD[0] | {"missing": []}}, "rank 0 named no rank"),
        (GOOD | {0: GOOD[0] | {"at": 10.0 + 2 * TIMEOUT}}, "named after 30.0 s"),
    ],
)
def test_what_is_wrong(reports, words):
    found = judge(reports, 3, 8.0, "its words")
    assert found.status is Status.FAIL
    assert words in found.reason


def test_a_job_that_does_not_start_is_skipped():
    found = judge({}, 3, 8.0, "no module named x")
    assert found.status is Status.SKIP
    assert "no module named x" in found.reason


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "x"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a,b"},
    ],
)
def test_the_job_inside_does_not_see_the_launcher_outside(launcher):
    others = {"PATH": "/bin", "PHALANX_LISTENER": "3"}
    assert discover(launcher | others).how != "alone"
    env = clean_environment(launcher | others, "cpu")
    assert discover(env).how == "alone"
    assert env["PATH"] == "/bin"
    assert "PHALANX_LISTENER" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in clean_environment(launcher | others, "cuda")
