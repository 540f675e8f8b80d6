"""The communicator of a run: the one that its configuration asks for, or none at all."""

from dataclasses import replace

import pytest
from tests.train.runs import TINY

import phalanx
from phalanx.schedule import ScheduleError
from phalanx.train.communicator import check_communicator, create_communicator_for
from phalanx.train.config import ConfigError
from phalanx.train.trainer import train
from phalanx.train.update import CommConfig


def test_a_communicator_that_ignores_a_setting_is_refused():
    """comm.algorithm and comm.timeout are those of the communicator, or the run does not begin."""

    def message(comm, **settings):
        config = replace(TINY, comm=replace(TINY.comm, **settings))
        with pytest.raises(ConfigError) as caught:
            train(config, comm, show=False)
        return str(caught.value)

    algorithms = phalanx.run_local(2, lambda comm: message(comm, algorithm="tree:2"), algorithm=phalanx.ring(2))
    assert all("comm.algorithm=tree:2, but the communicator of 2 ranks runs ring(2): call train(config)" in m for m in algorithms)
    (timeout,) = phalanx.run_local(1, lambda comm: message(comm, timeout=30.0))
    assert "comm.timeout=30, but the communicator gives up after 56 s" in timeout


@pytest.mark.parametrize("timeout", [0.5, 3.0, 11.0, 12.0, 13.0, 60.0, 1000.0])
def test_a_communicator_with_the_same_settings_is_taken(timeout):
    config = CommConfig(algorithm="tree:2", timeout=timeout)
    phalanx.run_local(2, lambda comm: check_communicator(config, comm), algorithm=phalanx.tree(2), timeout=timeout)
    with phalanx.create_communicator(timeout=timeout) as alone:
        check_communicator(replace(config, algorithm=None), alone)


def test_without_a_communicator_a_run_makes_its_own():
    """One rank, no launcher: the run has what its configuration asks for."""
    made = create_communicator_for(CommConfig(algorithm="torus:1x1", timeout=7.0))
    with made:
        assert made.schedule == phalanx.torus(1, 1)
        assert made.patience == 7.0
    result = train(replace(TINY, epochs=1), show=False)
    assert result.why == "epochs"
    with pytest.raises(ScheduleError, match="is for 4 ranks, but this job has 1"):
        train(replace(TINY, comm=CommConfig(algorithm="ring:4")), show=False)
