"""`simulate` against textbooks' formulas, against a simulation event by event, and where ports are shared."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.closed_forms import (
    halving_doubling_seconds,
    hierarchical_seconds,
    recursive_doubling_seconds,
    ring_seconds,
    torus_seconds,
    tree_seconds,
)
from tests.cluster.event_simulation import simulate_events
from tests.long import often

from phalanx.cluster import GLOO, NCCL, PLAIN, Cluster, ClusterError, Link, Uplink, compile_schedule, run, simulate, uniform
from phalanx.schedule import (
    Move,
    Schedule,
    Step,
    gossip,
    halving_doubling,
    hierarchical,
    latency_steps,
    lower,
    recursive_doubling,
    ring,
    torus,
    tree,
)

A, RATE, S = 5e-6, 12.5e9, 51e6
B = 1 / RATE


def flat(n):
    return uniform(n, latency=A, bandwidth=RATE)


def close(seconds, expected):
    assert seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13, 64])
def test_a_ring_takes_what_its_formula_says(n):
    close(simulate(ring(n), flat(n), S).seconds, ring_seconds(n, S, A, B))


@pytest.mark.parametrize("dims", [(2, 2), (3, 2), (4, 8), (8, 4), (2, 3, 4), (1, 5), (5, 1)])
def test_a_torus_takes_what_its_formula_says(dims):
    close(simulate(torus(*dims), flat(int(np.prod(dims))), S).seconds, torus_seconds(dims, S, A, B))


@pytest.mark.parametrize("n", [2, 4, 8, 64, 256])
def test_halving_and_doubling_take_what_their_formulas_say(n):
    close(simulate(halving_doubling(n), flat(n), S).seconds, halving_doubling_seconds(n, S, A, B))
    close(simulate(recursive_doubling(n), flat(n), S).seconds, recursive_doubling_seconds(n, S, A, B))


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16, 31])
def test_a_tree_takes_its_steps(n):
    # without bytes no port is ever busy: what is left is the number of steps; bytes are checked by the stupid simulator below
    s = tree(n)
    close(simulate(s, flat(n), 0).seconds, tree_seconds(latency_steps(s), s.chunks, 0, A, B))
    assert simulate(s, flat(n), S).seconds >= tree_seconds(latency_steps(s), s.chunks, S, A, B) * (1 - 1e-9)


def test_leaders_of_hosts():
    cluster = Cluster("two levels", 4, 3, Link(1e-6, 100e9), Link(A, RATE))
    expected = hierarchical_seconds(4, 3, S, (1e-6, 1e-11), (A, B))
    close(simulate(hierarchical(4, 3), cluster, S).seconds, expected)


SCHEDULES = st.sampled_from((ring, tree, halving_doubling, recursive_doubling))


@settings(max_examples=40, deadline=None)
@given(SCHEDULES, st.integers(1, 16), st.floats(1, 1e8))
def test_arrays_and_a_simulation_event_by_event_agree(make, n, nbytes):
    seconds, expected = simulate(make(n), flat(n), nbytes).seconds, max(simulate_events(make(n), flat(n), nbytes))
    assert seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [*range(2, 33), 48, *often(40, 64)])
def test_arrays_and_events_agree_on_trees(n):
    for nbytes in (1e3, 3e5, *often(1, 3e4, 1e6, 3e6, 1e7, 1e8)):
        expected = max(simulate_events(tree(n), flat(n), nbytes))
        assert simulate(tree(n), flat(n), nbytes).seconds == pytest.approx(expected, rel=1e-6)


def by_hand(n, *steps, per_host=1, latency, **changes):
    """Messages of 1 byte over ports with 1 byte/s, by pairs of ranks: the schedule and its cluster."""
    moves = tuple(Step(tuple(Move(src, dst, range(1)) for src, dst in step)) for step in steps)
    cluster = Cluster("by hand", n // per_host, per_host, Link(latency, 1e9), Link(latency, 1.0), **changes)
    return Schedule("by hand", n, 1, moves, goal="mixing"), cluster


def test_a_message_does_not_wait_for_others_of_its_step():
    # latency 5, passing 1. Rank 1 sends to 0 from 0 to 1, and 2, which begins late, from 2 to 3: rank 0 has both at 8, though the
    # first arrives at 6. A rank posts all messages of a step at once.
    schedule, cluster = by_hand(3, [(1, 0), (2, 0)], latency=5.0)
    start = np.array([0.0, 0.0, 2.0])
    assert list(simulate(schedule, cluster, 1.0, start=start).end) == simulate_events(schedule, cluster, 1.0, start) == [8, 1, 3]
    # rank 2 is late because of a message of step 0, which it has sent at 1: it sends the next from 1 to 2, and that arrives at 7
    schedule, cluster = by_hand(4, [(2, 1)], [(3, 0), (2, 0)], latency=5.0)
    assert list(simulate(schedule, cluster, 1.0).end) == simulate_events(schedule, cluster, 1.0) == [7, 6, 2, 1]


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        ([[(0, 4)], [(1, 5)]], {}),
        ([[(0, 4)], [(1, 5)]], {"ports": 4, "uplink": Uplink(1, 1.0)}),
        ([[(4, 0)], [(5, 1)]], {"ports": 4, "uplink": Uplink(1, 1.0)}),
        ([[(0, 4)], [(1, 5), (2, 6)], [(3, 7)]], {}),
    ],
)
def test_a_port_carries_messages_of_different_steps_no_faster_than_it_can(steps, changes):
    schedule, cluster = by_hand(8, *steps, per_host=4, latency=0.0, **changes)
    messages = sum(map(len, steps))
    assert simulate(schedule, cluster, 1.0).seconds == pytest.approx(messages)
    assert max(simulate_events(schedule, cluster, 1.0)) == pytest.approx(messages)


def test_a_bus_carries_messages_of_different_steps_no_faster_than_it_can():
    schedule, cluster = by_hand(4, [(0, 1)], [(2, 3)], per_host=4, latency=0.0, shared="host")
    assert simulate(schedule, cluster, 1e9).seconds == max(simulate_events(schedule, cluster, 1e9)) == pytest.approx(2.0)


def test_ranks_divide_their_port_also_in_different_steps():
    schedule, cluster = by_hand(4, [(0, 2)], [(1, 3)], per_host=2, latency=0.0)
    assert simulate_events(schedule, cluster, 1.0) == [2, 2, 2, 2]
    assert list(simulate(schedule, cluster, 1.0).end) == [2, 2, 2, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from(("pair", "rank", "host")), st.integers(0, 3))
def test_the_shortcut_is_exact(hosts, per_host, ports, shared, seed):
    cluster = Cluster("any", hosts, per_host, Link(1e-6, 50e9), Link(A, RATE), ports=ports, shared=shared, uplink=Uplink(2, RATE))
    start = np.random.default_rng(seed).random(cluster.ranks) * 1e-3 * (seed > 0)
    grids = [(rows, cluster.ranks // rows) for rows in range(1, cluster.ranks + 1) if cluster.ranks % rows == 0]
    for schedule in (ring(cluster.ranks), *(torus(*grid) for grid in grids)):
        for profile in (PLAIN, GLOO):
            program = compile_schedule(schedule, cluster, profile)
            # with ports of its own, a run is one of arrays: events have no shortcut
            quick, slow = run(program, S, start=start, ports={}), run(program, S, start=start, ports={}, shortcut=False)
            np.testing.assert_allclose(quick.end, slow.end, rtol=1e-9)


def test_the_shortcut_waits_for_ports_too():
    # eight columns of two through ports that two share: after one round all clocks have moved equally, and the ports have not
    cluster = Cluster("two levels", 4, 4, Link(1e-6, 50e9), Link(A, RATE), ports=2)
    slow = simulate(torus(2, 8), cluster, S, shortcut=False)
    np.testing.assert_allclose(simulate(torus(2, 8), cluster, S).end, slow.end, rtol=1e-9)


def test_collectives_as_arrays_equal_their_lowered_messages():
    cluster = Cluster("two levels", 4, 4, Link(1e-6, 50e9), Link(A, RATE), ports=2)
    for schedule in (ring(16), torus(4, 4), torus(2, 8), torus(2, 2, 4), hierarchical(4, 4)):
        np.testing.assert_allclose(simulate(schedule, cluster, S).end, simulate(lower(schedule), cluster, S).end, rtol=1e-9)


@pytest.mark.parametrize(("latency", "bound"), [(1e-6, "bytes"), (1e-1, "latency")])
def test_pieces_of_a_buffer_hide_each_others_latency(latency, bound):
    n, lanes = 4, 4
    cluster = uniform(n, latency=latency, bandwidth=RATE)
    profile = replace(PLAIN, lanes=lanes, lane_bytes=1)
    rounds, message = 2 * (n - 1), S / n / lanes * B
    busy_port = rounds * lanes * message + latency
    waiting = rounds * (latency + message) + (lanes - 1) * message
    expected = busy_port if bound == "bytes" else waiting
    for shortcut in (True, False):
        close(simulate(ring(n), cluster, S, profile=profile, shortcut=shortcut).seconds, expected)
    assert expected < ring_seconds(n, S, latency, B)  # which is what one piece takes
    close(simulate(ring(n), cluster, S, profile=replace(profile, lane_bytes=S)).seconds, ring_seconds(n, S, latency, B))


def test_later_clocks_end_later_by_as_much():
    cluster = Cluster("two levels", 4, 2, Link(1e-6, 50e9), Link(A, RATE))
    early, late = simulate(torus(4, 2), cluster, S), simulate(torus(4, 2), cluster, S, start=np.full(8, 7.0))
    np.testing.assert_allclose(late.end - 7.0, early.end, rtol=1e-9)


def test_a_straggler_delays_only_those_who_need_it():
    start = np.zeros(8)
    start[0] = 1.0
    end = simulate(gossip(8, 0), flat(8), S, start=start).end
    assert sum(end > 1.0) == 3  # itself, whom it sends to, and who sends to it
    assert (simulate(ring(8), flat(8), S, start=start).end > 1.0).all()


@pytest.mark.parametrize(("queue", "more"), [(0.0, 0.0), (0.5, 0.0), (0.6, 0.2), (1.0, 0.5), (9.0, 0.5)])
def test_the_word_of_a_receiver_stands_behind_data_in_ports(queue, more):
    """Two pieces between two hosts, L = 0.5 s away, d = 2 s each way in each of two rounds.

    Data of the first piece leave at L and arrive at 2 L + d = 3, those of the second leave from 2.5 to 4.5 and arrive until 5.
    The first piece's next word comes at 3. It stands behind data in its own port, and after L in the other's, for up to `queue`
    each, and is heard at 5 at the latest: the port's next data, which could leave at 4.5, may feel the last 0.5 s of that.
    What is late then is late to the end: L + 4 d + L = 9 s, and more.
    """
    profile = replace(PLAIN, lanes=2, lane_bytes=1, rendezvous=True, queue=queue)
    cluster = uniform(2, latency=0.5, bandwidth=1.0)
    assert simulate(halving_doubling(2), cluster, 8.0, profile=profile).seconds == pytest.approx(9.0 + more)


def test_with_a_rendezvous_a_sender_waits_until_it_has_heard_of_its_receiver():
    send = Schedule("send", 2, 1, (Step((Move(0, 1, range(1)),)),), goal="mixing")
    profile = replace(PLAIN, rendezvous=True)

    def end(sender, receiver):
        return simulate(send, flat(2), S, profile=profile, start=np.array([sender, receiver])).end[1]

    close(end(0.0, 0.0), 2 * A + S * B)
    close(end(A, 0.0), 2 * A + S * B)  # the word came just in time
    close(end(3 * A, 0.0), 4 * A + S * B)
    close(end(0.0, 1.0), 1.0 + 2 * A + S * B)
    close(simulate(ring(4), flat(4), S, profile=profile).seconds, ring_seconds(4, S, 2 * A, B))


def two_hosts(**changes):
    return Cluster("shared", 2, 2, Link(1e-6, 50e9), Link(A, RATE), **changes)


EXCHANGE = Schedule("exchange", 4, 1, (Step((Move(0, 2, range(1)), Move(1, 3, range(1)))),), goal="mixing")


def test_two_messages_through_one_port_take_turns():
    close(simulate(EXCHANGE, two_hosts(), S).seconds, A + 2 * S * B)
    close(simulate(EXCHANGE, two_hosts(ports=2), S).seconds, A + S * B)


def test_a_thin_uplink_is_shared():
    close(simulate(EXCHANGE, two_hosts(ports=2, uplink=Uplink(1, RATE / 2)), S).seconds, A + 4 * S * B)
    close(simulate(EXCHANGE, two_hosts(ports=2, uplink=Uplink(2, RATE / 2)), S).seconds, A + S * B)  # nothing leaves the group


def test_a_bus_is_shared_by_its_host():
    inside = Schedule("inside", 4, 1, (Step((Move(0, 1, range(1)), Move(1, 0, range(1)))),), goal="mixing")
    close(simulate(inside, two_hosts(shared="host"), S).seconds, 1e-6 + 2 * S / 50e9)
    close(simulate(inside, two_hosts(), S).seconds, 1e-6 + S / 50e9)


def test_steps_of_several_sizes_go_through_lowering():
    from phalanx.schedule import Collective

    mixed = Step((Collective("all_reduce", (0, 1), range(6)), Collective("all_reduce", (2, 3, 4), range(6))))
    schedule = Schedule("mixed", 5, 6, (mixed,), goal="mixing")
    np.testing.assert_allclose(simulate(schedule, flat(5), S).end[:2], ring_seconds(2, S, A, B), rtol=1e-9)
    np.testing.assert_allclose(simulate(schedule, flat(5), S).end[2:], ring_seconds(3, S, A, B), rtol=1e-9)


def test_a_timeline_adds_up_and_counts_messages():
    timeline = simulate(torus(4, 4), flat(16), S)
    close(sum(timeline.by_label().values()), timeline.seconds)
    assert timeline.messages == 16 * (3 + 6 + 3)
    assert simulate(torus(4, 4), flat(16), S, profile=NCCL).messages == timeline.messages


def test_a_schedule_of_another_world_is_refused():
    with pytest.raises(ClusterError, match=r"for 4 ranks, cluster .* has 8"):
        simulate(ring(4), flat(8), S)


def test_impossible_bytes_and_clocks_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        simulate(ring(4), flat(4), -1)
    with pytest.raises(ValueError, match="one time per rank"):
        simulate(ring(4), flat(4), 1, start=np.zeros(3))


def test_more_bytes_never_take_less():
    cluster = two_hosts()
    for profile in (PLAIN, GLOO, NCCL):
        times = [simulate(ring(4), cluster, size, profile=profile).seconds for size in (0, 1e3, 1e6, 1e8)]
        assert times == sorted(times)
        assert times[-1] > times[0]


def test_four_thousand_ranks_rank_by_rank():
    timeline = simulate(torus(64, 64), flat(4096), 25e6, shortcut=False)
    close(timeline.seconds, torus_seconds((64, 64), 25e6, A, B))
    assert timeline.messages == 4096 * 252
