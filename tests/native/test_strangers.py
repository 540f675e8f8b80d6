"""Ranks that share a kernel but may not share memory: other users, other pid namespaces. All of them say so, and fall back."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from phalanx.native import core

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
]

PROGRAM = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from phalanx.native.team import HostTeam
port, rank, user = map(int, sys.argv[1:])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30), wait_for_workers=False)
team = HostTeam.join(store, rank, 2, timeout=20, name="strangers")
print("together" if team else "apart")
if team:
    team.barrier()
store.set(f"done{rank}", "")
store.wait(["done0", "done1"], timedelta(seconds=20))
"""


def meet(*, user: int = 0, prefix: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """What two ranks print, and what rank 0 logs; rank 1 is the stranger."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    commands = [
        [sys.executable, "-c", PROGRAM, str(port), "0", "0"],
        [*prefix, sys.executable, "-c", PROGRAM, str(port), "1", str(user)],
    ]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for c in commands]
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [out.strip() for out, _ in told], told[0][1]


def test_negative_control_two_ranks_of_one_user_share():
    assert meet() == (["together", "together"], "")


def test_another_user_is_told_apart():
    words, log = meet(user=65534)
    assert words == ["apart", "apart"]
    assert "Permission denied" in log
    assert len(log.splitlines()) == 1


def test_another_pid_namespace_is_told_apart():
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("no pid namespaces here")
    words, log = meet(prefix=(unshare, "--pid", "--fork", "--mount-proc"))
    assert words == ["apart", "apart"]
    assert "rank 1 lives in another pid namespace" in log
