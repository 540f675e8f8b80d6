"""A round of messages as arrays against the same round message by message, in plain Python, on any ports, sizes and clocks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.cluster import PLAIN, Cluster, Link, Uplink
from phalanx.cluster.rounds import Queued, down, make_round, tick
from phalanx.cluster.routes import route

MICRO = 1e-6  # s; all times are whole microseconds, so that messages often come at once
NBYTES = 1e3  # a microsecond at 1e9 bytes/s


def one_by_one(src, dst, part, routes, clock, free):
    """The clocks after the round; `free` is updated."""
    head = [max(clock[a], clock[b] + notice) for a, b, notice in zip(src, dst, routes.notice)]
    tail, left = list(head), [None] * len(head)
    for stage in routes.stages:
        coming = sorted(range(stage.of.size), key=lambda i: tick(head[stage.of[i]]))  # stable: then in the order of the schedule
        for message, port in zip(stage.of[coming], stage.port[coming]):
            seconds = part[message] * NBYTES / stage.rate
            end = max(head[message] + seconds, tail[message], free[stage.key][port] + seconds)
            head[message], tail[message], free[stage.key][port] = end - seconds, end, end
            if left[message] is None:
                left[message] = end
                head[message] += routes.latency[message]
                tail[message] += routes.latency[message]
    after = clock.copy()
    for a, b, sent, received in zip(src, dst, left, tail):
        after[a], after[b] = max(after[a], sent), max(after[b], received)
    return after


CLUSTERS = st.builds(
    lambda hosts, per_host, ports, shared, rack: Cluster(
        "any",
        hosts,
        per_host,
        Link(MICRO, 4e9),
        Link(3 * MICRO, 1e9),
        ports=ports,
        shared=shared,
        uplink=Uplink(rack, 5e8) if rack else None,
    ),
    hosts=st.sampled_from((1, 2, 3, 70)),
    per_host=st.integers(2, 5),
    ports=st.integers(1, 3),
    shared=st.sampled_from(("pair", "rank", "host")),
    rack=st.integers(0, 2),
)


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(CLUSTERS, st.booleans(), st.booleans(), st.sampled_from((1, 4)), st.integers(0, 2**16))
def test_rounds_of_queues_equal_messages_one_by_one(cluster, rendezvous, everyone, sizes, seed):
    draw = np.random.default_rng(seed)
    ranks = cluster.ranks
    shift = draw.integers(1, ranks, size=1 if everyone else draw.integers(1, 2 * ranks))
    src = draw.permutation(ranks) if everyone else draw.integers(0, ranks, shift.size)
    dst = (src + shift) % ranks
    part = 4.0 * draw.integers(1, sizes + 1, src.size)
    routes = route(cluster, replace(PLAIN, rendezvous=rendezvous), src, dst)
    one = make_round(src, dst, part, routes, ranks=ranks, busy={stage.key for stage in routes.stages})
    assert isinstance(one, Queued)
    free = {stage.key: np.full(stage.ports, -20 * MICRO) for stage in routes.stages}
    free_one_by_one = {key: ports.copy() for key, ports in free.items()}
    clock = draw.integers(-20, 20, ranks) * MICRO
    expected, one_round = clock, one.scaled(NBYTES, free)
    for _ in range(3):  # ports are busy from the second round on
        clock, expected = one_round(clock), one_by_one(src, dst, part, routes, expected, free_one_by_one)
        np.testing.assert_allclose(clock, expected, rtol=0, atol=1e-15)
        for key, ports in free.items():
            np.testing.assert_allclose(ports, free_one_by_one[key], rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (3, 5), (3, 500), (500, 3)])
def test_running_sums_and_maxima_are_numpys(shape):
    table = np.random.default_rng(0).random(shape)
    kept = table.copy()
    for running in (np.add, np.maximum):
        np.testing.assert_array_equal(down(running, table), running.accumulate(table, axis=0))
    np.testing.assert_array_equal(table, kept)
