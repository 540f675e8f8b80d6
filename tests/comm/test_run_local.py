"""Ranks as threads: the same communicator without a launcher, and an exception of one rank is everybody's."""

import threading
import time

import pytest
import torch

import phalanx
from phalanx.comm.choose import LAB

LARGE = LAB.small_on_one_host // 4 + 7


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_results_come_in_rank_order(n):
    def play(comm):
        small, large = comm.all_reduce(torch.tensor([comm.rank])), comm.all_reduce(torch.full((LARGE,), float(comm.rank)))
        assert large.eq(sum(range(n))).all()
        comm.barrier()
        return comm.rank, comm.size, small.item(), comm.allgather_obj(comm.rank)

    assert phalanx.run_local(n, play) == [(rank, n, sum(range(n)), list(range(n))) for rank in range(n)]


def test_more_ranks_than_a_window_of_peers():
    n = 35

    def play(comm):
        got = comm.alltoall([torch.tensor([comm.rank, q]) for q in range(n)])
        assert [x.tolist() for x in got] == [[q, comm.rank] for q in range(n)]
        assert comm.bcast_obj(comm.rank, n - 1) == n - 1

    phalanx.run_local(n, play)


@pytest.mark.parametrize(("n", "hosts"), [(6, 2), (6, 3), (4, 2), (8, 4), (4, 1), (4, 4)])
def test_pretended_hosts_give_places_and_a_torus(n, hosts):
    per_host = n // hosts

    def play(comm):
        assert comm.all_reduce(torch.ones(LARGE)).eq(n).all()
        return comm.inter_rank, comm.intra_rank, comm.inter_size, comm.intra_size, comm.schedule.name

    answers = phalanx.run_local(n, play, hosts=hosts)
    assert [a[:4] for a in answers] == [(r // per_host, r % per_host, hosts, per_host) for r in range(n)]
    if hosts > 1 and per_host > 1:
        assert {a[4] for a in answers} == {f"torus({hosts}x{per_host})"}
    else:
        assert not any(a[4].startswith("torus") for a in answers)


def test_a_split_keeps_the_places_of_its_ranks():
    def play(comm):
        host = comm.split(comm.inter_rank)
        across = comm.split(comm.intra_rank)
        return host.inter_size, host.intra_size, across.inter_size, across.intra_size, across.inter_rank

    assert phalanx.run_local(6, play, hosts=2) == [(1, 3, 2, 1, r // 3) for r in range(6)]


@pytest.mark.parametrize("algorithm", [phalanx.ring(4), phalanx.torus(2, 2), phalanx.tree(4), phalanx.hierarchical(2, 2)])
def test_an_algorithm_of_choice(algorithm):
    def play(comm):
        assert comm.schedule == algorithm
        assert comm.all_reduce(torch.full((LARGE,), float(comm.rank))).eq(6).all()

    phalanx.run_local(4, play, algorithm=algorithm)


def test_an_exception_of_one_rank_is_raised_and_the_others_are_told():
    heard = {}

    def play(comm):
        if comm.rank == 2:
            raise KeyError("broken")
        try:
            comm.all_reduce(torch.ones(3))
        except phalanx.CommunicationError as error:
            heard[comm.rank] = error
            raise

    begun = time.monotonic()
    with pytest.raises(KeyError, match="broken"):
        phalanx.run_local(4, play, timeout=60.0)
    assert time.monotonic() - begun < 30  # far from the timeout, on a busy machine, too
    assert set(heard) == {0, 1, 3}
    for error in heard.values():
        assert error.missing == (2,)
        assert "rank 2 raised KeyError: 'broken'" in str(error)
        assert "all_reduce" in error.operation


def test_a_rank_that_ends_early_is_missed():
    def play(comm):
        if comm.rank:
            comm.barrier()

    begun = time.monotonic()
    with pytest.raises(phalanx.CommunicationError, match="rank 0") as caught:
        phalanx.run_local(3, play, timeout=1.0)
    assert caught.value.missing == (0,)
    assert time.monotonic() - begun < 15  # of a second, and what a busy machine adds


def test_no_threads_are_left():
    before = set(threading.enumerate())
    phalanx.run_local(3, lambda comm: comm.all_reduce(torch.ones(LARGE)))
    with pytest.raises(ZeroDivisionError):
        phalanx.run_local(3, lambda comm: comm.barrier() if comm.rank else 1 / 0, timeout=1.0)
    end = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.02)
    assert set(threading.enumerate()) - before == set()


@pytest.mark.parametrize(
    ("n", "options"),
    [(0, {}), (-1, {}), (3, {"hosts": 2}), (3, {"hosts": 0}), (2, {"timeout": 0}), (3, {"algorithm": phalanx.ring(2)})],
)
def test_wrong_arguments(n, options):
    with pytest.raises(ValueError):
        phalanx.run_local(n, lambda comm: None, **options)


def test_a_string_is_not_an_algorithm():
    with pytest.raises(TypeError, match="Schedule"):
        phalanx.run_local(2, lambda comm: None, algorithm="ring")


def test_alone_without_a_launcher():
    with phalanx.create_communicator() as comm:
        assert (comm.rank, comm.size, comm.intra_size, comm.inter_size) == (0, 1, 1, 1)
        x = torch.ones(3)
        assert comm.all_reduce(x, "mean") is x
        assert comm.allgather_obj({"a": (1,)}) == [{"a": (1,)}]
        assert comm.split(0).bcast(x) is x
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        comm.barrier()
