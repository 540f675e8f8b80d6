"""Verbs of an elastic communicator in which a rank dies: all survivors have the same result, or all raise."""

from __future__ import annotations

import json

import pytest
from tests.world.test_elastic import start  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("warm_python")

VERBS = """
import json, os, signal, sys, time
import torch, phalanx

comm = phalanx.create_communicator(elastic=True)
found = {}

def die(member, late):
    "One member dies before the next verb, in which one waits for it. Another comes so late that it knows."
    comm.barrier()
    if comm.member == member:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.member == late:
        while not comm.unsettled:
            time.sleep(0.01)

def note(name, verb):
    try:
        found[name] = verb()
    except phalanx.CommunicationError as error:
        found[name] = [str(error), list(error.missing)]
    found[name + " and then"] = comm.all_reduce(torch.ones(1)).item()

die(0, late=3)
note("the root lives", lambda: comm.bcast(torch.tensor([7.0]) if comm.member == 2 else None, root=2).tolist())
die(1, late=2)
note("the root dies", lambda: comm.bcast_obj({"rate": 0.1} if comm.member == 1 else None))
die(4, late=3)
note("gather", lambda: comm.gather(torch.ones(1)))
print(json.dumps({"member": comm.member} | found), flush=True)
"""


def test_survivors_agree_on_what_is_repeated(start, tmp_path):  # noqa: F811
    program = tmp_path / "verbs.py"
    program.write_text(VERBS)
    job = start(5, program=program)
    assert job.end() == 0, job.words
    told = [json.loads(line) for line in job.words.splitlines() if line.startswith("{")]
    assert sorted(own.pop("member") for own in told) == [2, 3], job.words
    assert told[0] == told[1]
    found = told[0]
    assert found["the root lives"] == [7.0]
    why, missing = found["the root dies"]
    assert why == "bcast(root 0): member 1, the root, has left, and this operation is not repeated without it"
    assert missing == [0]
    why, missing = found["gather"]
    assert why.startswith("gather(root 0) lost member 4; the world has 2 ranks now")
    assert missing == [2]
    assert [found[f"{name} and then"] for name in ("the root lives", "the root dies", "gather")] == [4.0, 3.0, 2.0]


PARAMETERS = """
import json, os, signal
import torch, phalanx

comm = phalanx.create_communicator(elastic=True)
model = torch.nn.ParameterDict({"a": torch.full((2,), float(comm.member)), "b": torch.full((2,), float(comm.member)).double()})
cast, casts = comm.bcast, []

def dying(x, root=0):
    casts.append(root)
    if comm.member == 0 and len(casts) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return cast(x, root)

comm.bcast = dying
phalanx.bcast_parameters(model, comm)
print(json.dumps({"member": comm.member} | {name: p.tolist() for name, p in model.items()}), flush=True)
"""


def test_parameters_come_from_one_rank_though_the_root_dies_between_two_dtypes(start, tmp_path):  # noqa: F811
    program = tmp_path / "parameters.py"
    program.write_text(PARAMETERS)
    job = start(3, program=program)
    assert job.end() == 0, job.words
    told = [json.loads(line) for line in job.words.splitlines() if line.startswith("{")]
    assert sorted(own.pop("member") for own in told) == [1, 2], job.words
    assert told == [{"a": [1.0, 1.0], "b": [1.0, 1.0]}] * 2
