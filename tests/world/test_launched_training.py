"""N ranks equal one process with the whole batch, whoever started them: torchrun, Open MPI, MPICH."""

from __future__ import annotations

import sys

import pytest
from tests.world.programs.train import OPTIONS
from tests.world.test_launchers import Job, mpich, mpirun

PROGRAM = "tests.world.programs.train"
# how far parameters may be off after the steps of the program
TOLERANCES = dict.fromkeys(OPTIONS, 1e-10) | {"one pass": 1e-5, "bfloat16": 2e-3, "float16": 3e-4}


def start(launcher: str, ranks: int) -> Job:
    python = [sys.executable, "-m", PROGRAM]
    if launcher == "torchrun":
        return Job([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", PROGRAM])
    return mpirun(ranks, python) if launcher == "Open MPI" else Job([mpich(), "-n", str(ranks), *python])


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), ("Open MPI", 3), ("MPICH", 2)])
def test_launched_ranks_equal_one_process(launcher: str, ranks: int) -> None:
    with start(launcher, ranks) as job:
        told = job.told()
    assert [own["rank"] for own in told] == list(range(ranks))
    for name in OPTIONS:
        results = [own[name] for own in told]
        assert len({own["print"] for own in results}) == 1, f"{name}: ranks differ"
        assert max(own["off"] for own in results) <= TOLERANCES[name], name
        assert min(own["moved"] for own in results) > 10 * TOLERANCES[name], f"{name}: a step without effect would pass, too"
        shared = told[0]["shares"] and name in ("one replica", "one pass")
        assert all(own["one_replica"] == shared for own in results), name
