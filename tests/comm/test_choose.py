"""Which schedule for which world: the rules, and that whatever they choose is an all-reduce of that world."""

import itertools

import pytest

from phalanx.comm.choose import for_less, for_world
from phalanx.comm.hosts import Hosts
from phalanx.schedule import halving_doubling, hierarchical, latency_steps, recursive_doubling, ring, torus, verify


def hosts(*widths):
    return Hosts.of([f"h{i}" for i, width in enumerate(widths) for _ in range(width)])


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        (hosts(1), halving_doubling(1)),
        (hosts(8), halving_doubling(8)),
        (hosts(6), ring(6)),
        (hosts(1, 1, 1), ring(3)),
        (hosts(1, 1, 1, 1), halving_doubling(4)),
        (hosts(4, 4), torus(2, 4)),
        (hosts(2, 2, 2), torus(3, 2)),
        (hosts(2, 1), ring(3)),
        (hosts(3, 1), halving_doubling(4)),
    ],
)
def test_rules(machines, wanted):
    assert for_world(machines) == wanted


def test_the_torus_follows_the_hosts_when_ranks_were_dealt_out_in_turn():
    chosen = for_world(Hosts.of(["a", "b", "a", "b"]))
    rows = [op.group for op in chosen.steps[0].ops]
    assert rows == [(0, 2), (1, 3)]  # the bulk of the traffic stays inside the hosts
    verify(chosen)


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        (hosts(8), ring(8)),
        (hosts(1, 1, 1, 1), halving_doubling(4)),
        (hosts(4, 4), torus(2, 4)),
        (hosts(3, 1), halving_doubling(4)),
    ],
)
def test_rules_where_the_ranks_of_a_host_share_memory(machines, wanted):
    assert for_world(machines, shared=True) == wanted


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n", range(1, 7))
def test_every_assignment_of_ranks_to_hosts_gets_an_all_reduce(n, shared):
    for keys in itertools.product("abc", repeat=n):
        smaller = for_less(Hosts.of(keys), shared=shared)
        assert list(smaller) == sorted(smaller, key=lambda choice: choice[0])
        for chosen in (for_world(Hosts.of(keys), shared=shared), *(choice[1] for choice in smaller)):
            assert (chosen.world, chosen.goal) == (n, "sum")
            verify(chosen)


@pytest.mark.parametrize("n", range(1, 34))
def test_small_messages_take_the_fewest_steps(n):
    ((_, chosen),) = for_less(hosts(n))
    assert chosen == recursive_doubling(n)
    assert latency_steps(chosen) <= min(latency_steps(ring(n)), latency_steps(halving_doubling(n)))


def test_between_hosts_less_counts_as_small():
    assert 0 < for_less(hosts(2, 2))[0][0] < for_less(hosts(4))[0][0]


def test_where_memory_is_shared_leaders_speak_for_their_hosts_until_a_torus_has_enough_to_send():
    (small, quick), (medium, ring_of_leaders) = for_less(hosts(2, 2, 2), shared=True)
    assert (quick, ring_of_leaders) == (hierarchical(3, 2, among=recursive_doubling), hierarchical(3, 2))
    assert small < medium < for_less(hosts(4, 4, 4), shared=True)[1][0]
    assert [chosen for _, chosen in for_less(hosts(4), shared=True)] == [ring(4)]  # one call among all of them
