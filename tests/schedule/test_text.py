"""Text and JSON: exact round trips, and errors that say where."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import times

from phalanx.schedule import (
    Collective,
    Move,
    Scale,
    Schedule,
    ScheduleError,
    Step,
    binomial,
    chain,
    from_json,
    from_text,
    gossip,
    halving_doubling,
    hierarchical,
    lower,
    recursive_doubling,
    ring,
    scatter_gather,
    to_json,
    to_text,
    torus,
    tree,
)

MINE = """\
# two ranks, by hand
schedule "mine"
world 2
chunks 2
goal sum
root 0

step "reduce-scatter"
  add 0 -> 1 [1]
  add 1 -> 0 [0]
step "all-gather"
  copy 0 -> 1 [0]
  copy 1 -> 0 [1]
"""

runs = st.builds(range, st.integers(-5, 50), st.integers(-5, 50), st.sampled_from([1, 1, 1, 2, -3]))
numbers = st.integers(-3, 5000)
kinds = st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"])
ops = st.one_of(
    st.builds(Move, numbers, numbers, runs, st.booleans()),
    st.builds(Collective, kinds, st.lists(numbers, max_size=5).map(tuple), runs),
    st.builds(Scale, runs, runs, st.fractions()),
)
steps = st.builds(Step, st.lists(ops, max_size=5).map(tuple), st.text())
goals = st.sampled_from(["sum", "mean", "mixing", "copy"])
schedules = st.builds(Schedule, st.text(), numbers, numbers, st.lists(steps, max_size=4).map(tuple), goals, numbers)


@settings(max_examples=times(150, seldom=60), deadline=None)
@given(schedules)
def test_any_schedule_survives_both_forms(s):
    assert from_text(to_text(s)) == s
    assert from_json(to_json(s)) == s


@pytest.mark.parametrize("write_read", [(to_text, from_text), (to_json, from_json)])
def test_every_algorithm_survives_both_forms(write_read):
    write, read = write_read
    for n in (1, 2, 5, 8):
        makes = [ring, halving_doubling, recursive_doubling, tree, binomial, scatter_gather, lambda n: torus(2, n)]
        for make in [*makes, lambda n: hierarchical(n, 3), lambda n: gossip(n, 7), lambda n: gossip(n, 2, "hypercube")]:
            for s in (make(n), lower(make(n))):
                assert read(write(s)) == s
    whole = chain([gossip(8, k, "hypercube") for k in range(3)], goal="mean", name='a "quoted"\nname')
    assert read(write(whole)) == whole


def test_the_text_is_for_people():
    assert from_text(MINE) == Schedule(
        "mine",
        2,
        2,
        (
            Step((Move(0, 1, range(1, 2), reduce=True), Move(1, 0, range(1), reduce=True)), "reduce-scatter"),
            Step((Move(0, 1, range(1)), Move(1, 0, range(1, 2))), "all-gather"),
        ),
    )
    assert to_text(torus(2, 2)).splitlines()[5:8] == [
        'step "reduce-scatter along rows"',
        "  reduce_scatter 0 1 [0:4]",
        "  reduce_scatter 2 3 [0:4]",
    ]
    assert "  scale 0:4 [0] by 1/2\n" in to_text(gossip(4, 0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('schedule "mine"', "shedule", r"line 2: 'shedule' where 'schedule \.\.\.' was expected"),
        ('"mine"', "mine", r"line 2: 'mine' is not a text in double quotes"),
        ("world 2", "world two", r"line 3: 'two' is not a whole number"),
        ("chunks 2\n", "", r"line 4: 'goal sum' where 'chunks \.\.\.' was expected"),
        ("goal sum", "goal best", r"line 5: goal 'best' is none of sum, mean, mixing, copy"),
        ('step "reduce-scatter"\n', "", r"line 8: 'add 0 -> 1 \[1\]' where 'step \.\.\.' was expected"),
        ("add 1 -> 0 [0]", "add 1 -> 0", r"line 10: 'add 1 -> 0' is none of"),
        ("add 1 -> 0 [0]", "scale 0:2 [0] by 1/0", r"line 10: 'scale 0:2 \[0\] by 1/0': factor '1/0' divides by zero"),
        ("add 1 -> 0 [0]", "scale 0:2:0 [0] by 1", r"line 10: .* must not be zero"),
        ("add 1 -> 0 [0]", "gather 0 1 [0]", r"line 10: 'gather 0 1 \[0\]' is none of"),
        (MINE, "", r"line 1: '' where 'schedule \.\.\.' was expected"),
    ],
)
def test_malformed_text_names_the_line(old, new, message):
    assert old in MINE
    with pytest.raises(ScheduleError, match=message):
        from_text(MINE.replace(old, new))


def edited(path, value):
    """The JSON of a small schedule with the thing at `path` exchanged, or removed where `value` is None."""
    data = json.loads(to_json(chain([gossip(2, 0), ring(2)], goal="sum")))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schedule": "x",\n"world": }', r"line 2: Expecting value"),
        ("[1]", r"the schedule is not an object with schedule, world"),
        (edited(["root"], None), r"the schedule is not an object with .*root"),
        (edited(["goal"], "best"), r"goal 'best' is none of"),
        (edited(["goal"], ["sum"]), r"goal \['sum'\] is none of"),
        (edited(["world"], "2"), r"world: '2' is not an int"),
        (edited(["world"], True), r"world: True is not an int"),
        (edited(["steps"], 3), r"steps: 3 is not a list"),
        (edited(["steps", 1], []), r"step 2 is not an object with label, ops"),
        (edited(["steps", 1, "label"], 5), r"the label of step 2: 5 is not a str"),
        (edited(["steps", 1, "ops", 0, "dst"], None), r"step 2, op 1 is not an object with src, dst"),
        (edited(["steps", 1, "ops", 0, "chunks"], [0]), r"step 2, op 1: chunks \[0\] is not a run"),
        (edited(["steps", 1, "ops", 0, "chunks"], [0, 4, 0]), r"step 2, op 1: chunks \[0, 4, 0\] is not a run"),
        (edited(["steps", 1, "ops", 0, "op"], "send"), r"step 2, op 1: 'send' is none of copy, add, scale"),
        (edited(["steps", 0, "ops", 0, "factor"], "half"), r"step 1, op 1: factor 'half'"),
        (edited(["steps", 0, "ops", 0, "factor"], "1/0"), r"step 1, op 1: factor '1/0'"),
        (edited(["steps", 0, "ops", 0, "factor"], 0.5), r"step 1, op 1: factor: 0.5 is not a str"),
        (edited(["steps", 2, "ops", 0, "group"], [0, "1"]), r"step 3, op 1: a rank: '1' is not an int"),
        ("[" * 100_000, r"not a schedule"),
    ],
)
def test_malformed_json_names_the_place(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_json(text)


def test_fractions_stay_exact():
    third = Schedule("third", 1, 1, (Step((Scale(range(1), range(1), Fraction(10**30, 3**40)),)),))
    assert from_text(to_text(third)) == from_json(to_json(third)) == third
