"""Which schedule for which world: the rules, and that whatever they choose is an all-reduce of that world."""

import itertools
import json
from dataclasses import replace

import pytest

from phalanx.comm.choose import LAB, choose
from phalanx.comm.hosts import Hosts
from phalanx.comm.planned import PLANNED, warn_if_unplanned
from phalanx.schedule import (
    gossip,
    halving_doubling,
    hierarchical,
    latency_steps,
    recursive_doubling,
    relabel,
    ring,
    to_json,
    torus,
    tree,
    verify,
)


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
    assert choose(machines).schedule == wanted


def test_the_torus_follows_the_hosts_when_ranks_were_dealt_out_in_turn():
    chosen = choose(Hosts.of(["a", "b", "a", "b"])).schedule
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
    assert choose(machines, shared=True).schedule == wanted


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n", range(1, 7))
def test_every_assignment_of_ranks_to_hosts_gets_an_all_reduce(n, shared):
    for keys in itertools.product("abc", repeat=n):
        found = choose(Hosts.of(keys), shared=shared)
        assert list(found.smaller) == sorted(found.smaller, key=lambda choice: choice[0])
        for chosen in (found.schedule, *(schedule for _, schedule in found.smaller)):
            assert (chosen.world, chosen.goal) == (n, "sum")
            verify(chosen)


@pytest.mark.parametrize("n", range(1, 34))
def test_small_messages_take_the_fewest_steps(n):
    ((_, chosen),) = choose(hosts(n)).smaller
    assert chosen == recursive_doubling(n)
    assert latency_steps(chosen) <= min(latency_steps(ring(n)), latency_steps(halving_doubling(n)))


def test_between_hosts_less_counts_as_small():
    assert 0 < choose(hosts(2, 2)).smaller[0][0] < choose(hosts(4)).smaller[0][0]


def test_where_memory_is_shared_leaders_speak_for_their_hosts_until_a_torus_has_enough_to_send():
    (small, quick), (medium, ring_of_leaders) = choose(hosts(2, 2, 2), shared=True).smaller
    assert (quick, ring_of_leaders) == (hierarchical(3, 2, among=recursive_doubling), hierarchical(3, 2))
    assert small < medium < choose(hosts(4, 4, 4), shared=True).smaller[1][0]
    assert [chosen for _, chosen in choose(hosts(4), shared=True).smaller] == [ring(4)]  # one call among all of them


def test_a_choice_names_the_origin_of_its_sizes():
    mine = replace(LAB, origin="my cluster", small_on_one_host=77)
    assert "lab" in choose(hosts(4)).origin
    assert choose(hosts(4), thresholds=mine).origin == "my cluster"
    assert choose(hosts(4), thresholds=mine).smaller[0][0] == 77


# ---- planned -------------------------------------------------------------------------------------------------------------------


def write_plan(path, *ranges, hosts=2, per_host=2):
    schedules = [{"up_to": limit, "schedule": json.loads(to_json(schedule))} for limit, schedule in ranges]
    path.write_text(json.dumps({"hosts": hosts, "per_host": per_host, "schedules": schedules}))
    return str(path)


def test_a_plan_for_these_hosts_decides_and_one_for_others_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv(PLANNED, write_plan(tmp_path / "plan", (1000, tree(4)), (5000, ring(4)), (None, torus(2, 2))))
    assert choose(hosts(2, 2)).schedule == torus(2, 2)
    assert choose(hosts(2, 2)).smaller == ((1000, tree(4)), (5000, ring(4)))
    assert choose(hosts(2, 2)).origin == f"{PLANNED}={tmp_path / 'plan'}"
    apart = Hosts.of(["a", "b", "a", "b"])
    assert choose(apart).schedule == relabel(torus(2, 2), (0, 2, 1, 3))
    warn_if_unplanned(apart)
    assert choose(hosts(4)).schedule == halving_doubling(4)
    with pytest.warns(UserWarning, match="for 2 hosts of 2 ranks, but this job has hosts of 4"):
        warn_if_unplanned(hosts(4))


def test_a_plan_with_one_schedule_serves_all_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv(PLANNED, write_plan(tmp_path / "plan", (None, ring(4))))
    ((limit, small),) = choose(hosts(2, 2)).smaller
    assert (choose(hosts(2, 2)).schedule, small) == (ring(4), ring(4))
    assert limit > 1 << 40


@pytest.mark.parametrize(
    ("ranges", "fact"),
    [
        (((None, ring(3)),), "not an all-reduce of 2 x 2"),
        (((None, gossip(4, 0)),), "not an all-reduce of 2 x 2"),
        (((None, replace(ring(4), steps=())),), "chunk 0 of rank 0"),
        (((9, ring(4)), (9, tree(4))), "must grow"),
        ((), "must grow"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(ranges, fact, tmp_path, monkeypatch):
    monkeypatch.setenv(PLANNED, write_plan(tmp_path / "plan", *ranges))
    with pytest.raises(ValueError, match=fact):
        choose(hosts(2, 2))


def test_a_file_that_is_no_plan_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(PLANNED, str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="No such file"):
        choose(hosts(2, 2))
    (tmp_path / "other").write_text("{}")
    monkeypatch.setenv(PLANNED, str(tmp_path / "other"))
    with pytest.raises(ValueError, match="is not what `phalanx plan --schedules` writes"):
        choose(hosts(2, 2))
