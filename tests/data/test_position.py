"""Exactly once, and resume anywhere: properties of the arithmetic over (n, ranks, batch, epoch, position, other ranks)."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.data import BatchPlan, Position, Stage
from phalanx.data import position as arithmetic
from phalanx.data.position import Steps, micro_batches, share
from phalanx.data.route import Route

LASTS = ("drop", "pad", "keep")
CASES = settings(max_examples=times(500, seldom=120), deadline=None)


@st.composite
def runs(draw):
    """(n, last, epoch, plan, ranks, other ranks, other plan): whole batches divide over the ranks, n is anything."""
    ranks, others = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    last = draw(st.sampled_from(LASTS))
    micro = draw(st.integers(1, 3))

    def plan_for(size):
        stages = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3))
        return BatchPlan([Stage(epochs, size * micro * k, micro_steps=micro) for epochs, k in stages])

    plan, other_plan = plan_for(ranks), plan_for(others)
    most = max(stage.batch for stage in (*plan.stages, *other_plan.stages))
    n = draw(st.integers(most if last == "drop" else 1, most + 60))
    return n, last, draw(st.integers(0, 8)), plan, ranks, others, other_plan


def epoch_of(n, last, plan, ranks, position):
    """What each rank does from `position` to the end of its epoch: a list of micro-batches per rank."""
    ways = [Route(n, plan, last, ranks, rank) for rank in range(ranks)]
    assert len({way.micro_count(position) for way in ways}) == 1
    count = ways[0].micro_count(position)
    return [list(itertools.islice(way.walk(position), count)) for way in ways]


def samples(ranks_did, n):
    """How often each place of the order came, all ranks together."""
    return Counter(place % n for did in ranks_did for micro in did for place in micro.places)


def check_exactly_once(n, last, epoch, plan, ranks):
    did = epoch_of(n, last, plan, ranks, Position(0, epoch))
    batch = plan.at(epoch).batch
    if last == "keep":
        expected = Counter(range(n))
    elif last == "drop":
        expected = Counter(range(n // batch * batch))
    else:
        expected = Counter(place % n for place in range(-(-n // batch) * batch))
    assert samples(did, n) == expected


def check_steps(n, last, epoch, plan, ranks):
    """All ranks make the same steps; of a whole batch all have equally much; a step takes consecutive places."""
    did = epoch_of(n, last, plan, ranks, Position(0, epoch))
    stage = plan.at(epoch)
    for together in zip(*did, strict=True):
        first = together[0]
        assert len({(m.index, m.step, m.number, m.of, m.after) for m in together}) == 1
        sizes = [len(m.places) for m in together]
        if len(first.step) == stage.batch:
            assert set(sizes) == {stage.split(ranks).micro_batch}
            assert first.of == stage.micro_steps
        else:
            assert last == "keep"
            assert first.index == len(Steps(n, stage.batch, last)) - 1
    for index, parts in itertools.groupby(sorted((m for d in did for m in d), key=lambda m: m.index), key=lambda m: m.index):
        parts = list(parts)
        places = [place for m in parts for place in m.places]
        assert sorted(places) == list(parts[0].step)
        assert parts[0].step.start == index * stage.batch
        by_rank = [sum(len(m.places) for m in d if m.index == index) for d in did]
        assert max(by_rank) - min(by_rank) <= 1
    assert {d[-1].after for d in did} == {Position(0, epoch + 1)}


def check_resume(n, last, epoch, plan, ranks, others, other_plan, stop):
    """Some steps on `ranks`, the rest of the epoch on `others`, maybe with other batches: nothing lost, nothing twice."""
    did = epoch_of(n, last, plan, ranks, Position(3, epoch))
    ends = [i for i, micro in enumerate(did[0]) if micro.ends_step]
    stopped = ends[stop % len(ends)]
    before = [d[: stopped + 1] for d in did]
    saved = before[0][-1].after
    resumed = Route(n, other_plan, last, others).reach(saved)
    after = epoch_of(n, last, other_plan, others, resumed) if resumed.epoch == epoch else []
    seen = samples(before, n) + samples(after, n)
    if last == "keep":
        assert seen == Counter(range(n))
    elif last == "drop":
        assert set(seen.values()) == {1}
        assert n - len(seen) < max(plan.at(epoch).batch, other_plan.at(epoch).batch)
        assert set(seen) == set(range(len(seen)))
    else:
        padding = sum(seen.values()) - n
        assert set(seen) == set(range(n))
        assert padding < max(plan.at(epoch).batch, other_plan.at(epoch).batch)


@CASES
@given(runs())
def test_exactly_once_in_the_same_steps_on_all_ranks(run):
    n, last, epoch, plan, ranks, _, _ = run
    check_exactly_once(n, last, epoch, plan, ranks)
    check_steps(n, last, epoch, plan, ranks)


@CASES
@given(runs(), st.integers(0, 100))
def test_resume_on_other_ranks_loses_and_repeats_nothing(run, stop):
    check_resume(*run, stop)


@settings(max_examples=times(100, seldom=40), deadline=None)
@given(runs(), st.integers(0, 100))
def test_the_same_batch_on_other_ranks_is_the_same_run(run, stop):
    """Where the batch divides over both numbers of ranks, every later step takes the very same places."""
    n, last, epoch, plan, ranks, _, _ = run
    alone = epoch_of(n, last, plan, 1, Position(0, epoch))[0]
    saved = alone[stop % len(alone)].after
    if saved.epoch == epoch:
        rest = epoch_of(n, last, plan, ranks, saved)[0]
        assert {(m.index, m.step) for m in rest} == {(m.index, m.step) for m in alone if m.step.start >= saved.samples}


# ---- the checks can fail

OFF_BY_ONE = {
    "a part too long": lambda places, parts, part: places[len(places) * part // parts : len(places) * (part + 1) // parts + 1],
    "a part too short": lambda places, parts, part: places[len(places) * part // parts : len(places) * (part + 1) // parts - 1],
    "parts of floor(n / parts)": lambda places, parts, part: places[
        len(places) // parts * part : len(places) // parts * (part + 1)
    ],
    "ranks confused": lambda places, parts, part: share(places, parts, (part + 1) % parts if part else part),
}


@pytest.mark.parametrize("name", sorted(OFF_BY_ONE))
def test_mutants_of_share_are_caught(name, monkeypatch):
    monkeypatch.setattr(arithmetic, "share", OFF_BY_ONE[name])
    with pytest.raises(AssertionError):
        check_exactly_once(23, "keep", 0, BatchPlan([Stage(1, 12, micro_steps=2)]), 3)


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("last", LASTS)
def test_a_position_that_is_off_by_one_is_caught(last, error, monkeypatch):
    right = Steps.position_after

    def wrong(self, s, position):
        after = right(self, s, position)
        return Position(after.seed, after.epoch, after.samples + error) if after.samples else after

    run = (40, last, 0, BatchPlan([Stage(1, 8)]), 4, 2, BatchPlan([Stage(1, 8)]), 1)
    check_resume(*run)
    monkeypatch.setattr(Steps, "position_after", wrong)
    with pytest.raises(AssertionError):
        check_resume(*run)


# ---- small examples and errors


def test_the_rules_for_the_last_batch():
    assert [list(step) for step in Steps(7, 3, "drop")] == [[0, 1, 2], [3, 4, 5]]
    assert [list(step) for step in Steps(7, 3, "keep")] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [[p % 7 for p in step] for step in Steps(7, 3, "pad")] == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert [[p % 2 for p in step] for step in Steps(2, 5, "pad")] == [[0, 1, 0, 1, 0]]
    assert [list(step) for step in Steps(7, 3, "keep", start=4)] == [[4, 5, 6]]
    assert [Steps(7, 3, last).samples for last in LASTS] == [6, 9, 7]


def test_a_small_batch_goes_to_as_many_as_it_can():
    assert [micro_batches(range(8, 10), 4, rank, 2) for rank in range(4)] == [
        (range(8, 8),),
        (range(8, 9),),
        (range(9, 9),),
        (range(9, 10),),
    ]


def test_a_position_without_a_step_left_is_the_next_epoch():
    way = Route(10, BatchPlan([Stage(1, 4)]), "drop")
    assert way.reach(Position(0, 2, 8)) == Position(0, 3)
    assert way.reach(Position(0, 2, 4)) == Position(0, 2, 4)
    assert Route(10, BatchPlan([Stage(1, 4)]), "keep").reach(Position(0, 2, 10)) == Position(0, 3)
    with pytest.raises(ValueError, match="10 samples"):
        way.reach(Position(0, 0, 11))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Steps(5, 2, "skip"), "last='skip': must be one of 'drop', 'pad', 'keep'"),
        (lambda: Steps(5, 0, "keep"), "at least 1"),
        (lambda: Steps(5, 2, "keep", start=6), "start=6 of an epoch of 5"),
        (lambda: Position(0, -1), "epoch must be 0 or more"),
        (lambda: Position(0, 0, -1), "samples must be 0 or more"),
        (lambda: Route(5, BatchPlan([Stage(1, 2)]), "keep", 2, 2), "rank 2 of 2"),
        (lambda: Route(0, BatchPlan([Stage(1, 2)]), "keep"), "no samples"),
        (
            lambda: Route(5, BatchPlan([Stage(1, 2), Stage(1, 8)]), "drop"),
            "batch of 8 of 5 samples: last='drop' would leave out all",
        ),
        (lambda: Route(5, BatchPlan([Stage(1, 2), Stage(1, 3)]), "keep", 2), "batch of 3 does not divide over 2 ranks"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
