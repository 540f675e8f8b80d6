"""Ctrl-C in the middle of a wait: the rank raises at once, the others learn it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from phalanx.native import core

pytestmark = [
    pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available"),
    pytest.mark.usefixtures("warm_python"),
]

PROGRAM = """
import sys, time
import torch.distributed as dist
from phalanx.native.errors import Aborted
from phalanx.native.team import HostTeam
path, rank = sys.argv[1], int(sys.argv[2])
team = HostTeam.join(dist.FileStore(path, 2), rank, 2, timeout=30, name="t")
if rank == 1:
    print("ready", flush=True)
    sys.stdin.readline()  # told to call when rank 0 has been interrupted
try:
    if rank == 0:
        print("ready", flush=True)
    team.barrier()
except KeyboardInterrupt:
    print("interrupted", flush=True)
except Aborted as error:
    print(error, flush=True)
sys.stdin.readline()
"""


def test_ctrl_c_ends_a_wait(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n", "ready\n"]
        time.sleep(0.3)
        sent = time.monotonic()
        ranks[0].send_signal(signal.SIGINT)
        assert ranks[0].stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < 15  # half of the timeout
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        assert ranks[1].stdout.readline() == "barrier(): a signal handler raised on rank 0\n"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=10)
