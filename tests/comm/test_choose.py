"""Which schedule for which world: the rules, and that whatever they choose is an all-reduce of that world."""

import itertools

import pytest

from phalanx.comm.choose import for_small, for_world, small_limit
from phalanx.comm.hosts import Hosts
from phalanx.schedule import halving_doubling, latency_steps, recursive_doubling, ring, torus, verify


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


@pytest.mark.parametrize("n", range(1, 7))
def test_every_assignment_of_ranks_to_hosts_gets_an_all_reduce(n):
    for keys in itertools.product("abc", repeat=n):
        chosen = for_world(Hosts.of(keys))
        assert (chosen.world, chosen.goal) == (n, "sum")
        verify(chosen)


@pytest.mark.parametrize("n", range(1, 34))
def test_small_messages_take_the_fewest_steps(n):
    assert for_small(n) == recursive_doubling(n)
    assert latency_steps(for_small(n)) <= min(latency_steps(ring(n)), latency_steps(halving_doubling(n)))


def test_between_hosts_less_counts_as_small():
    assert 0 < small_limit(hosts(2, 2)) < small_limit(hosts(4))
