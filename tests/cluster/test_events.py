"""Small programs event by event: against an independent simulation, against arrays, and which programs are priced so."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster import event_simulation
from tests.cluster.event_simulation import Flow, simulate_events
from tests.cluster.test_fair import any_network
from tests.long import times

from phalanx.cluster import NCCL, PLAIN, Cluster, Link, compile_schedule, run, simulate, uniform
from phalanx.cluster.events import fair_rates, run_events
from phalanx.schedule import Collective, Move, Schedule, Step, halving_doubling, hierarchical, ring, torus, tree

simulator = import_module("phalanx.cluster.simulate")  # the package has a function of this name
PORTS = 6


def sends(ranks, *steps):
    """Messages of a whole buffer of one chunk, by pairs of ranks."""
    moves = tuple(Step(tuple(Move(src, dst, range(1)) for src, dst in step)) for step in steps)
    return Schedule("by hand", ranks, 1, moves, goal="mixing")


def hosts_of(per_host, hosts=2, **changes):
    return Cluster("by hand", hosts, per_host, Link(0.0, 1e9), Link(0.0, 1.0), **changes)


MEETING = sends(4, [(0, 2)], [(1, 3)])  # two messages of a second through one port, in different steps
FAIR, TURNS = [2, 2, 2, 2], [1, 2, 1, 2]


@settings(max_examples=times(200, seldom=50), deadline=None)
@given(
    st.lists(st.lists(st.integers(1, PORTS), min_size=1, max_size=3, unique=True), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=PORTS, max_size=PORTS),
)
def test_rates_are_max_min_fair(routes, capacity):
    expected = event_simulation.fair_rates(
        [Flow(0, 0, 0, 0.0, tuple(route), 0.0) for route in routes], dict(enumerate(capacity, 1))
    )
    ports = np.array([route + [0] * (3 - len(route)) for route in routes])
    np.testing.assert_allclose(fair_rates(ports, np.array([np.inf, *capacity])), expected, rtol=1e-6)


def any_messages(chance, ranks):
    """Some steps of messages between random ranks, of one to three chunks; some ranks have several in a step, or none."""
    steps = []
    for _ in range(6):
        pairs = {(int(src), int(dst)) for src, dst in chance.integers(0, ranks, (ranks, 2)) if src != dst}
        steps.append(Step(tuple(Move(src, dst, range(int(chance.integers(1, 4)))) for src, dst in sorted(pairs))))
    return Schedule("any messages", ranks, 3, tuple(steps), goal="mixing")


@pytest.mark.parametrize("seed", range(times(60, seldom=12)))
def test_any_messages_on_any_network_agree_with_another_simulation(seed):
    chance = np.random.default_rng(seed)
    cluster, size = any_network(chance, int(chance.choice((1, 2, 3, 5, 8))))
    schedule, start = any_messages(chance, cluster.ranks), chance.random(cluster.ranks) * 1e-3 * (seed % 2)
    expected = simulate_events(schedule, cluster, size, start)
    assert simulate(schedule, cluster, size, start=start).end == pytest.approx(expected, rel=1e-6), (cluster, size)


@pytest.mark.parametrize("make", [ring, tree, halving_doubling])
def test_where_nothing_is_shared_arrays_and_events_agree_in_every_phase(make):
    profile = replace(PLAIN, start=3e-6, message=2e-6, rendezvous=True)
    program = compile_schedule(make(7), uniform(7, latency=5e-6, bandwidth=12.5e9), profile)
    start = 1e3 + np.arange(7) * 1e-5
    timeline = run(program, 1e6, start=start)
    events = run_events(program, 1e6, start + profile.start)
    np.testing.assert_allclose(events - 1e3, timeline.clocks[1:] - 1e3, rtol=1e-6)


def test_software_keeps_ranks_busy_also_where_ports_are_shared():
    cluster = hosts_of(2)
    slow = replace(PLAIN, message=6.0)
    # each end of a message is busy for 3 s, then all share the port; the clocks before the first phase are those of the start
    timeline = simulate(MEETING, cluster, 1.0, profile=slow, start=np.full(4, 7.0))
    assert [list(clock) for clock in timeline.clocks] == [[7, 7, 7, 7], [12, 7, 12, 7], [12, 12, 12, 12]]
    assert timeline.labels == ("", "")


def test_a_message_that_is_held_back_elsewhere_leaves_room_to_others():
    # three messages come to rank 2, so that from rank 1 has a third of the rate, and the other from rank 1 has two thirds
    schedule, cluster = sends(5, [(0, 2), (1, 2), (4, 2), (1, 3)]), hosts_of(1, 5)
    assert simulate(schedule, cluster, 1.0).end == pytest.approx([3, 3, 3, 1.5, 3])
    assert run(compile_schedule(schedule, cluster, PLAIN), 1.0, ports={}).end == pytest.approx([3, 3, 3, 2, 3])


def test_messages_that_begin_nearly_together_do_not_begin_at_once():
    start = np.array([0.0, 0.005, 0.0, 0.005])  # the first is alone for as long, and ends as much earlier
    assert simulate(sends(4, [(0, 2), (1, 3)]), hosts_of(2), 1.0, start=start).end == pytest.approx([1.995, 2, 1.995, 2])


@pytest.mark.parametrize(("most", "end"), [(3, FAIR), (2, FAIR), (1, TURNS)])
def test_large_programs_take_turns(monkeypatch, most, end):
    program = compile_schedule(MEETING, hosts_of(2), PLAIN)
    assert list(run(program, 1.0, most_by_events=most).end) == end
    monkeypatch.setattr(simulator, "MOST_BY_EVENTS", most)
    assert list(simulate(MEETING, hosts_of(2), 1.0).end) == end


@pytest.mark.parametrize(
    "profile", [replace(PLAIN, queue=1e-9, rendezvous=True), replace(PLAIN, lanes=2, lane_bytes=0.5)], ids=("queue", "pieces")
)
def test_what_events_do_not_know_is_priced_by_arrays(monkeypatch, profile):
    monkeypatch.setattr(simulator, "run_events", None)
    assert simulate(MEETING, hosts_of(2), 1.0, profile=profile).end.max() == pytest.approx(2.0)
    one_piece = replace(profile, lane_bytes=2.0, queue=0.0)
    with pytest.raises(TypeError):  # these would need them
        simulate(MEETING, hosts_of(2), 1.0, profile=one_piece)


def test_library_calls_are_priced_by_arrays(monkeypatch):
    monkeypatch.setattr(simulator, "run_events", None)
    both = replace(MEETING, steps=(Step((Collective("all_reduce", (0, 1), range(1)),)), *MEETING.steps))
    assert simulate(both, hosts_of(2), 1.0, profile=NCCL).seconds > 2.0


def test_rounds_without_doubts_need_no_events(monkeypatch):
    monkeypatch.setattr(simulator, "run_events", None)
    cluster = Cluster("4 x 4", 4, 4, Link(1e-6, 50e9), Link(5e-6, 12.5e9), ports=2)
    for schedule in (ring(16), torus(4, 4), halving_doubling(16), hierarchical(4, 4)):
        for start in (0.0, 1e3):
            assert simulate(schedule, cluster, 16e6, start=np.full(16, start)).seconds > 0
