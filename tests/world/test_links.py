"""Links that are cut, between hosts that are network namespaces: the link is named, and every process ends as it should."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.lab import Lab, LabError
from tests.long import often

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("warm_python")
PROGRAM = """
import os, pathlib, subprocess, sys, time, torch, phalanx
folder = pathlib.Path(sys.argv.pop(1))
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 4:  # on a busy machine the ranks' imports end further apart than the timeout
    time.sleep(0.05)
comm = phalanx.create_communicator(phalanx.ring(4), timeout=6)
x = torch.ones(1 << 18)
comm.all_reduce(x)
comm.barrier()
for word in sys.argv[2:]:
    here, there = map(int, word.split(">"))
    if comm.rank == here:
        subprocess.run(["ip", "route", "add", "blackhole", f"10.77.0.{there + 1}/32"], check=True)
try:
    for _ in range(1000):
        comm.all_reduce(x)
except phalanx.CommunicationError as error:
    print(error, flush=True)
    if sys.argv[1] == "raise":
        raise
"""


def needs_namespaces() -> None:
    if os.geteuid() != 0 or subprocess.run(["which", "ip"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces need root, and the command ip")


@pytest.mark.parametrize(
    ("cuts", "then", "words"),
    [
        (("1>2",), "raise", "the link between rank 1 and rank 2 moves no data"),
        *often((("3>0",), "catch", "rank 3 does not answer: dead, stopped or cut off")),  # from the store's host, too
    ],
    ids=["one way between two", *often("one way from the store")],
)
def test_a_cut_link_is_named_and_all_ranks_end_well(cuts, then, words, tmp_path):
    needs_namespaces()
    try:
        with Lab(hosts=4, ranks_per_host=1, rate="1gbit").up() as net:
            env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            ranks = net.start([sys.executable, "-c", PROGRAM, str(tmp_path), then, *cuts], env=env)
            deadline = time.monotonic() + 60
            while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
            codes = [rank.process.poll() for rank in ranks]
            said = [rank.output() for rank in ranks]
    except LabError as error:
        pytest.skip(str(error))
    assert codes == [1 if then == "raise" else 0] * 4, said
    for rank in range(4):
        if cuts == ("3>0",) and rank == 3:
            assert "rank 0 does not answer" in said[rank]  # as far as it can tell
        else:
            assert words in said[rank], said
