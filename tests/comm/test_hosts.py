"""Hosts: which ranks share one, whatever the hosts are called."""

import itertools
import socket

import pytest

from phalanx.comm.hosts import Hosts, host_key


def test_ranks_in_blocks():
    hosts = Hosts.of(["a", "a", "a", "b", "b", "b"])
    assert hosts.ranks == ((0, 1, 2), (3, 4, 5))
    assert hosts.grid == (2, 3)
    assert [hosts.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_ranks_dealt_out_in_turn():
    hosts = Hosts.of(["b", "a", "b", "a"])
    assert hosts.ranks == ((0, 2), (1, 3))  # hosts in the order of their lowest rank, not of their names
    assert [hosts.place(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_uneven_hosts_are_no_grid():
    assert Hosts.of(["a", "a", "b"]).grid is None
    assert Hosts.of(["a"]).grid == (1, 1)


@pytest.mark.parametrize("n", range(1, 6))
def test_every_rank_has_one_place_for_every_assignment(n):
    for keys in itertools.product("abc", repeat=n):
        hosts = Hosts.of(keys)
        places = [hosts.place(rank) for rank in range(n)]
        assert len(set(places)) == n
        for (p, q), (i, j) in zip(itertools.combinations(places, 2), itertools.combinations(range(n), 2)):
            assert (p[0] == q[0]) == (keys[i] == keys[j])
            assert p[0] != q[0] or p[1] < q[1]  # in rank order on a host


def test_a_stranger_has_no_place():
    with pytest.raises(ValueError, match="rank 2"):
        Hosts.of(["a", "b"]).place(2)


def test_the_key_does_not_depend_on_the_name(monkeypatch):
    before = host_key()
    assert before == host_key()
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert host_key() == before
    assert "localhost" not in before


def test_a_kernel_without_proc_still_has_a_key(monkeypatch):
    def absent(*_):
        raise FileNotFoundError

    monkeypatch.setattr("phalanx._kernel.Path.read_text", absent)
    assert socket.gethostname() in host_key()
