"""Gossip in processes of which one is away for a while, or cut off for good: it comes back, or it ends; the others go on."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.lab import Bridge, Lab, call
from tests.long import only_long
from tests.world.programs.gossip import DEFAULTS, STARTED, train

import phalanx

PROGRAM = Path(__file__).parent / "programs" / "gossip.py"
pytestmark = pytest.mark.usefixtures("warm_python")
DEADLINE = 150.0
needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="only root may make network namespaces, with ip and tc",
)
slow = pytest.mark.skipif(
    os.environ.get("PHALANX_TEST_SLOW") != "1", reason="half a minute each, in network namespaces: PHALANX_TEST_SLOW=1 runs it"
)


def start(n, options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    command = [sys.executable, str(PROGRAM), json.dumps(options)]
    return [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(n)
    ]


@only_long
def test_one_that_is_stopped_and_one_that_sleeps_come_back():
    """In one job: kill -STOP on rank 1 for 4 s after its 100th step, and 4 s of sleep on rank 2 after its 200th."""
    steps = 400
    usual = phalanx.run_local(4, lambda comm: train(comm, DEFAULTS | {"steps": steps, "nap": 0}), timeout=60)[0]["spread"]
    ranks = start(4, {"steps": steps, "nap": 0.02, "sleep": {"rank": 2, "at": 200, "seconds": 4}})
    try:
        assert json.loads(ranks[1].stdout.readline()) == STARTED
        os.kill(ranks[1].pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(ranks[1].pid, signal.SIGCONT)
        end = time.monotonic() + DEADLINE
        words = [rank.communicate(timeout=max(0.1, end - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for r, (out, err) in enumerate(words):
        assert ranks[r].returncode == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["steps"] == steps
        assert (found["missing"], found["finally"], found["left"], found["versions"]) == ([], [], 4, 1), (r, found, err)
        assert found["recent"] >= 10, (r, found, err)  # it exchanges again
        assert found["spread"] < 3 * usual, (found, usual, err)
        if r in (1, 2):
            assert found["own"] < steps
            assert f"rank {r}: it was left behind by" in err
            assert "It takes over the replica of rank" in err
        else:
            # on a busy machine it may have been away itself, and then says so
            assert found["own"] == steps or f"rank {r}: it was left behind by" in err, (r, found, err)
            assert "rank 1 did not answer" in err


# ---- cut off -------------------------------------------------------------------------------------------------------------------


def cut(net, host, how):
    if how == "down":
        call("ip", "-n", net.spaces[host], "link", "set", "eth0", "down")
        return
    call("tc", "-n", net.spaces[host], "qdisc", "replace", "dev", "eth0", "root", "blackhole")
    hub = net.spaces[0].removesuffix("-0") + "-bridge"
    call("tc", "-n", hub, "qdisc", "replace", "dev", f"port{host}", "root", "blackhole")


def run_cut(victims, how, *, heal_after=None, steps=800):
    """Exit status, last line and warnings of 4 ranks, of which `victims` lose their network after 100 steps."""
    with Lab(hosts=4, ranks_per_host=1).up(Bridge) as net:
        ranks = net.start([sys.executable, str(PROGRAM), json.dumps({"steps": steps, "timeout": 12})])
        end = time.monotonic() + DEADLINE
        try:
            while not all(rank.output() for rank in ranks):
                assert time.monotonic() < end, ranks[0].errors()
                time.sleep(0.05)
            for host in victims:
                cut(net, host, how)
            if heal_after is not None:
                time.sleep(heal_after)
                for host in victims:
                    call("ip", "-n", net.spaces[host], "link", "set", "eth0", "up")
            while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
                    rank.process.wait()
        return [(rank.process.returncode, json.loads(rank.output().splitlines()[-1]), rank.errors()) for rank in ranks]


@slow
@needs_lab
@pytest.mark.parametrize(
    ("victims", "how"),
    [([2], "down"), ([0], "blackhole"), ([2, 3], "down")],
    ids=["one, its link is down", "rank 0, which holds the store", "half of them"],
)
def test_a_minority_that_is_cut_off_ends_and_the_others_go_on(victims, how):
    others = [r for r in range(4) if r not in victims]
    for r, (status, found, err) in enumerate(run_cut(victims, how)):
        if r in victims:
            assert status == 1, (r, status, err)
            assert f"rank {r}: gossip stops here: it cannot reach rank" in err
            assert found == STARTED
        else:
            assert status == 0, (r, status, err)
            assert (found["left"], found["versions"], found["recent"]) == (len(others), 1, 20), (found, err)
            assert found["missing"] == found["finally"] == victims


@slow
@needs_lab
def test_one_whose_network_heals_comes_back():
    for r, (status, found, err) in enumerate(run_cut([1], "down", heal_after=4, steps=1500)):
        assert status == 0, (r, err)
        assert (found["left"], found["versions"], found["finally"]) == (4, 1, []), (found, err)
        assert found["recent"] >= 10, (found, err)
        assert ("rank 1: it was left behind by" in err) == (r == 1)
