"""Placement is judged by facts alone, so machines that are not here can be tried."""

import copy

import pytest
import torch
from tests.selftest.worlds import CPU

import phalanx
from phalanx.selftest import placement
from phalanx.selftest.facts import own_facts
from phalanx.selftest.result import Status


def rank(number, host=0, **changes):
    """A rank with a GPU of its own, and 16 cores of 64."""
    facts = {
        "rank": number,
        "host": f"node{host}",
        "host_number": host,
        "device": f"cuda:{number % 4}",
        "gpu": {"name": "A100", "uuid": f"GPU-{number}", "memory": 1 << 36, "visible": 4},
        "contexts": [],
        "versions": {"phalanx": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cuda": "12.8", "nccl": "2.27.3"},
        "network": {
            "interfaces": ["lo", "eth0", "ib0"],
            "interface": "eth0",
            "address": f"10.0.0.{host + 1}",
            "rank_0": "10.0.0.1",
        },
        "cores": list(range(16 * (number % 4), 16 * (number % 4) + 16)),
        "cores_of_host": 64,
        "threads": 8,
        "native_core": {"there": True, "kernels": "avx512"},
        "shares_memory": True,
        "environment": {},
    }
    assert changes.keys() <= facts.keys()
    return copy.deepcopy(facts | changes)


def cluster():
    """Two hosts with four ranks each."""
    return [rank(number, number // 4) for number in range(8)]


def changed(number, **changes):
    return [rank(own["rank"], own["host_number"], **(changes if own["rank"] == number else {})) for own in cluster()]


JUDGES = {name: getattr(placement, f"judge_{name}") for name in (
    "hosts", "gpus", "contexts", "versions", "network", "native_core", "threads",
)}  # fmt: skip


@pytest.mark.parametrize("judge", JUDGES)
def test_a_good_cluster_passes(judge):
    assert JUDGES[judge](cluster()).status is Status.PASS


def test_it_says_where_the_ranks_are():
    found = placement.judge_hosts(cluster())
    assert found.reason == "4 ranks on node0, 4 ranks on node1"
    assert found.figures["ranks"][5] == {"rank": 5, "host": "node1", "device": "cuda:1"}
    assert "no torus" in placement.judge_hosts(cluster()[:7]).reason


@pytest.mark.parametrize(
    ("judge", "facts", "words"),
    [
        ("gpus", changed(5, gpu=rank(4)["gpu"]), "ranks 4, 5 share GPU GPU-4 of node1"),
        ("gpus", changed(5, gpu=None), "rank 5 of 8 see no GPU"),
        ("contexts", changed(6, contexts=[0, 1]), "rank 6 works on cuda:2, but holds a context on cuda:0, cuda:1"),
        ("versions", changed(3, versions=rank(0)["versions"] | {"nccl": "2.21.5"}), "nccl differs: 2.27.3 on ranks 0, 1, 2, 4"),
        ("versions", changed(3, versions={"phalanx": "0.1.0"}), "torch differs"),
        ("network", changed(7, environment={"NCCL_SOCKET_IFNAME": "ens5"}), "=ens5 on rank 7, but host node1 has lo"),
        ("network", changed(7, environment={"GLOO_SOCKET_IFNAME": "=eth"}), "GLOO_SOCKET_IFNAME"),
        ("network", changed(0, network=rank(0)["network"] | {"address": "127.0.1.1"}), "rank 0 would be reached at 127.0.1.1"),
        ("network", changed(0, network=rank(0)["network"] | {"address": ""}), "at no address"),
        ("native_core", changed(2, native_core={"there": False, "why": "no native core"}), "rank 2 have none"),
        ("threads", changed(2, threads=64), "4 ranks on node0 run 88 threads on 64 cores"),
        ("threads", [rank(number, cores=[0], threads=1) for number in range(4)], "are bound to 1 core, of 64"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(judge, facts, words):
    found = JUDGES[judge](facts)
    assert found.status is Status.FAIL
    assert words in found.reason
    assert found.remedy


@pytest.mark.parametrize(
    ("judge", "facts"),
    [
        # one GPU per rank, which each of them calls cuda:0
        ("gpus", [rank(n, device="cuda:0", environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(4)]),
        # the same numbers on another host are other GPUs
        ("gpus", [rank(n, n // 4, gpu=rank(n % 4)["gpu"]) for n in range(8)]),
        ("network", changed(7, environment={"NCCL_SOCKET_IFNAME": "^docker"})),
        ("network", changed(7, environment={"NCCL_SOCKET_IFNAME": "ib"})),
        ("network", changed(7, environment={"GLOO_SOCKET_IFNAME": "ib0,eth0"})),
        # on one host loopback is right
        ("network", [rank(n, network=rank(0)["network"] | {"interface": "lo", "address": "127.0.0.1"}) for n in range(4)]),
        # more ranks than cores, but one thread each
        ("threads", [rank(n, cores=[0, 1], cores_of_host=2, threads=1) for n in range(4)]),
    ],
)
def test_what_only_looks_wrong_passes(judge, facts):
    assert JUDGES[judge](facts).status is Status.PASS


def test_idle_gpus_are_mentioned():
    assert "6 GPUs more visible" in placement.judge_gpus([rank(0, gpu=rank(0)["gpu"] | {"visible": 8}), rank(1)]).reason
    assert "more visible" not in placement.judge_gpus(cluster()).reason


def test_cpus_skip_what_is_about_gpus():
    facts = [rank(number, gpu=None, device="cpu", contexts=None) for number in range(2)]
    assert placement.judge_gpus(facts).status is Status.SKIP
    assert placement.judge_contexts(facts).status is Status.SKIP
    assert placement.judge_contexts(changed(1, contexts=None)).status is Status.SKIP  # a torch that does not tell
    without = [rank(number, native_core={"there": False, "why": "PHALANX_NATIVE=0"}) for number in range(2)]
    assert placement.judge_native_core(without).status is Status.SKIP


def test_the_facts_of_this_machine(monkeypatch):
    """They have what the judges read, are plain data, and hold no secret."""
    monkeypatch.setenv("PHALANX_SECRET", "x" * 64)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with phalanx.create_communicator() as comm:
        facts = own_facts(comm, CPU)
        assert comm.allgather_obj(facts) == [facts]
    assert rank(0).keys() <= facts.keys()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["environment"]["NCCL_DEBUG"] == "INFO"
    assert "x" * 64 not in str(facts)
    assert all(judge([facts]).status is not Status.FAIL for name, judge in JUDGES.items() if name != "threads")
