"""Ports and uplinks that messages share fairly, against an independent simulation, event by event."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.plan_simgrid import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.event_simulation import simulate_events
from tests.long import times

from phalanx.cluster import PLAIN, Cluster, Link, Uplink, compile_schedule, run, simulate
from phalanx.cluster.fair import fair_ends
from phalanx.schedule import (
    Move,
    Schedule,
    Step,
    gossip,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    ring,
    torus,
    tree,
)

INSIDE, RATE = Link(1e-6, 50e9), 12.5e9
EXACT = 1e-6
EXCHANGE = Schedule("exchange", 4, 1, (Step((Move(0, 2, range(1)), Move(1, 3, range(1)))),), goal="mixing")


def cluster_of(hosts, per_host, **changes):
    return Cluster("shared", hosts, per_host, INSIDE, Link(5e-6, RATE), **changes)


def one_port(come, work, most):
    """Ends at one port, in small steps of time: as stupid as it gets."""
    left, ends, now, tick = list(work), [None] * len(work), 0.0, 1e-3
    while None in ends:
        active = [i for i in range(len(work)) if ends[i] is None and come[i] <= now + 1e-9]
        for i in active:
            left[i] -= tick * min(most, 1 / len(active))
            if left[i] <= 1e-9:
                ends[i] = now + tick
        now += tick
    return ends


@settings(max_examples=times(60, seldom=20), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=6),
    st.sampled_from((1.0, 0.5, 0.3)),
)
def test_messages_divide_their_port(first, second, most):
    rows = max(len(first), len(second))
    come, work = np.full((rows, 2), np.inf), np.zeros((rows, 2))
    for column, messages in enumerate((first, second)):
        for row, (begin, seconds) in enumerate(messages):
            come[row, column], work[row, column] = begin / 10, seconds / 10
    ends = fair_ends(come, work, most)
    for column, messages in enumerate((first, second)):
        expected = one_port([b / 10 for b, _ in messages], [s / 10 for _, s in messages], most)
        np.testing.assert_allclose(ends[: len(messages), column], expected, atol=0.02)
        assert np.isinf(ends[len(messages) :, column]).all()


def test_rounding_leaves_no_message_that_never_ends():
    come = [15.734125287480506, 15.782198641833446, 15.782202641833445, 15.782232641833446, 15.734095020813838]
    come = np.array([*come, 15.782202375166777, 15.782202641833447])[:, None]
    ends = fair_ends(come, np.full((7, 1), 0.048107354352941174), 1.0)
    assert (ends > come).all()
    assert ends.max() == pytest.approx(come.min() + 7 * 0.048107354352941174, abs=0.05)  # the port is never idle for long


def test_two_messages_of_a_second_through_an_infinite_uplink_take_a_second():
    cluster = Cluster("two racks", 2, 2, Link(0, 1e9), Link(0, 1.0), ports=2, uplink=Uplink(1, 1e12))
    assert simulate(EXCHANGE, cluster, 1.0).seconds == pytest.approx(1.0)
    assert simulate(EXCHANGE, replace(cluster, uplink=Uplink(1, 1.0)), 1.0).seconds == pytest.approx(2.0)


def schedules(hosts, per_host):
    n = hosts * per_host
    yield from (ring(n), torus(hosts, per_host), halving_doubling(n), recursive_doubling(n), tree(n), gossip(n, 1))
    if per_host > 1:
        yield hierarchical(hosts, per_host)


@pytest.mark.parametrize(("hosts", "per_host", "ports", "rack"), [(4, 4, 2, 2), (8, 2, 1, 4), (4, 4, 4, 1), (6, 1, 1, 2)])
def test_racks_that_block_nothing_cost_nothing(hosts, per_host, ports, rack):
    flat = cluster_of(hosts, per_host, ports=ports)
    racks = replace(flat, uplink=Uplink(rack, rack * ports * RATE))
    for schedule in schedules(hosts, per_host):
        for size in (0.5e6, 16e6):
            assert simulate(schedule, racks, size).seconds == pytest.approx(simulate(schedule, flat, size).seconds, rel=1e-6)


CLUSTERS = [
    cluster_of(4, 2),
    cluster_of(4, 4, ports=2, shared="pair"),
    cluster_of(4, 2, uplink=Uplink(2, 2 * RATE), shared="host"),
    cluster_of(4, 2, ports=2, uplink=Uplink(2, RATE)),
    cluster_of(2, 3, shared="host"),
    cluster_of(8, 1, uplink=Uplink(4, 2 * RATE)),
    cluster_of(5, 2, uplink=Uplink(2, 2 * RATE)),
]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=range(len(CLUSTERS)))
def test_the_simulator_agrees_with_events_one_by_one(cluster):
    for schedule in schedules(cluster.hosts, cluster.per_host):
        for size in (0.5e6, 16e6):
            expected = simulate_events(schedule, cluster, size)
            assert simulate(schedule, cluster, size).end == pytest.approx(expected, rel=EXACT), (schedule.name, size)


def any_network(chance, per_host):
    """A cluster of 2 hosts or up to 16 ranks and a number of bytes: latencies, ports, and thin and thick uplinks by chance."""
    hosts, ports = int(chance.integers(2, max(2, 16 // per_host) + 1)), int(chance.integers(1, per_host + 1))
    latency, shared = 10 ** chance.uniform(-6.5, -3.5), str(chance.choice(("pair", "rank", "host")))
    below = int(chance.integers(1, hosts))
    uplink = Uplink(below, below * ports * RATE * chance.choice((0.25, 0.5, 1, 2))) if chance.random() < 0.5 else None
    cluster = Cluster("any", hosts, per_host, INSIDE, Link(latency, RATE), ports=ports, shared=shared, uplink=uplink)
    return cluster, 10 ** chance.uniform(2, 8.3)


@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("seed", range(times(10, seldom=1)))
def test_it_agrees_on_any_network(seed, per_host):
    chance = np.random.default_rng((seed, per_host))
    cluster, size = any_network(chance, per_host)
    for schedule in schedules(cluster.hosts, cluster.per_host):
        expected = simulate_events(schedule, cluster, size)
        assert simulate(schedule, cluster, size).end == pytest.approx(expected, rel=EXACT), (schedule.name, cluster, size)


@pytest.mark.parametrize(
    ("schedule", "inside", "latency", "size", "shared"),
    [
        (recursive_doubling(15), 50e9, 1e-4, 2e6, "host"),
        (halving_doubling(21), 12.5e9, 5e-5, 29e6, "rank"),
        (tree(27), 12.5e9, 1.3e-5, 480e3, "pair"),
    ],
    ids=("recursive doubling", "halving and doubling", "tree"),
)
def test_it_agrees_where_three_ranks_share_a_port_in_different_steps(schedule, inside, latency, size, shared):
    cluster = Cluster("hosts of 3", schedule.world // 3, 3, Link(1e-6, inside), Link(latency, RATE), shared=shared)
    expected = simulate_events(schedule, cluster, size)
    assert simulate(schedule, cluster, size).end == pytest.approx(expected, rel=EXACT)
    turns = run(compile_schedule(schedule, cluster, PLAIN), size, ports={}).end  # what large programs get
    assert 0.05 < abs(turns.max() / max(expected) - 1) < 0.15


@pytest.mark.parametrize("seed", range(times(3, seldom=1)))
def test_it_agrees_where_ranks_begin_at_different_times(seed):
    for cluster in (CLUSTERS[0], CLUSTERS[5]):
        start = np.random.default_rng(seed).random(cluster.ranks) * 1e-3
        for schedule in schedules(cluster.hosts, cluster.per_host):
            expected = simulate_events(schedule, cluster, 16e6, start)
            assert simulate(schedule, cluster, 16e6, start=start).end == pytest.approx(expected, rel=EXACT), schedule.name


def test_messages_one_after_the_other_would_not_pass():
    # sixteen ranks share a port: whoever is served first would begin its next round early, and hide the latency of the others
    cluster = cluster_of(8, 16)
    seconds = simulate(torus(8, 16), cluster, 0.5e6).seconds
    fair = 14 * (5e-6 + 0.5e6 / 16 / 8 * 16 / RATE) + 2 * 15 * (1e-6 + 0.5e6 / 16 / 50e9)
    assert seconds == pytest.approx(fair, rel=1e-6)


def test_it_agrees_with_simgrid_as_recorded():
    rows = Path(__file__).parents[2] / "benchmarks" / "results" / "plan_simgrid.jsonl"
    recorded = [row for line in rows.read_text().splitlines() if "simgrid_s" in (row := json.loads(line))]
    for (schedule, cluster, size), row in zip(cases(), recorded, strict=True):
        assert schedule.name == row["schedule"]
        assert simulate(schedule, cluster, size).seconds == pytest.approx(row["simgrid_s"], rel=0.02), row


def test_rounds_do_not_overtake_each_other_in_a_port():
    cluster = cluster_of(2, 2)
    program = compile_schedule(torus(2, 2), cluster, replace(PLAIN, lanes=4, lane_bytes=1))
    busy = run(program, 16e6).seconds
    assert busy >= 2 * 16e6 / 2 / 2 * 2 / RATE  # what the port must carry
