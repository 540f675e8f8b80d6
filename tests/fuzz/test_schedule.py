"""Schedules as text and as JSON, and the file that PHALANX_SCHEDULES names: an algorithm comes out, or ScheduleError."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phalanx.schedule.limits import work
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import JSON, TEXT

from phalanx.cluster import PRESETS, PROFILES, by_size
from phalanx.comm.planned import parse_planned
from phalanx.schedule import (
    Collective,
    Move,
    Scale,
    Schedule,
    ScheduleError,
    Step,
    from_json,
    from_text,
    gossip,
    halving_doubling,
    hierarchical,
    lower,
    lowered_ops,
    ring,
    show,
    to_json,
    to_text,
    torus,
    trace,
    tree,
    verify,
)

SEEDS = (
    ring(3), lower(ring(3)), torus(2, 3), lower(torus(2, 2)), hierarchical(2, 2), halving_doubling(4), tree(3), gossip(4, 1), ring(1),
)  # fmt: skip
CHEAP = 20_000  # slots that a case may touch


def use(s):
    """Everything that is done with a schedule from a file."""
    assert from_text(to_text(s)) == s
    assert from_json(to_json(s)) == s
    if work(s) < CHEAP and lowered_ops(s) < CHEAP:
        verify(s)
        verify(lower(s))
        show(s)
        trace(s)


TEXTS = Parser(
    "schedule text",
    lambda data: use(from_text(data.decode("utf-8", "replace"))),
    (ScheduleError,),
    tuple(to_text(s).encode() for s in SEEDS),
    TEXT,
)
JSONS = Parser(
    "schedule JSON",
    lambda data: use(from_json(data.decode("utf-8", "replace"))),
    (ScheduleError,),
    tuple(to_json(s).encode() for s in SEEDS),
    JSON,
)
PLANNED = Parser(
    "planned schedules",
    lambda data: parse_planned(data.decode("utf-8", "replace")),
    (ValueError,),
    (by_size.to_file(PRESETS["lab"].with_ranks(4), PROFILES["gloo"]).encode(),),
    JSON,
)


@pytest.mark.parametrize("cases", blocks())
def test_text(cases):
    assert set(fuzz(TEXTS, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks())
def test_json(cases):
    assert set(fuzz(JSONS, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks())
def test_planned(cases):
    assert set(fuzz(PLANNED, cases)) == {"accepted", "refused"}


# ---- what is written reads back equal ------------------------------------------------------------------------------------------

ranks = st.integers(0, 7)
runs = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda pair: range(pair[0], pair[0] + pair[1]))
ops = st.one_of(
    st.builds(Move, ranks, ranks, runs, st.booleans()),
    st.builds(
        Collective,
        st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"]),
        st.lists(ranks, unique=True).map(tuple),
        runs,
    ),
    st.builds(Scale, runs, runs, st.fractions(max_denominator=10**9, min_value=0, max_value=10**9)),
)
schedules = st.builds(
    Schedule,
    st.text(max_size=20),
    st.integers(1, 65536),
    st.integers(1, 1 << 20),
    st.lists(st.builds(Step, st.lists(ops, max_size=4).map(tuple), st.text(max_size=20)), max_size=4).map(tuple),
    st.sampled_from(["sum", "mean", "mixing", "copy"]),
    st.integers(0, 100),
)


@settings(max_examples=50, deadline=None)
@given(schedules)
def test_what_is_written_reads_back_equal(s):
    assert from_text(to_text(s)) == s
    assert from_json(to_json(s)) == s
    assert from_json(json.dumps(json.loads(to_json(s)))) == s


def test_factors_read_back_equal():
    for factor in (Fraction(0), Fraction(1, 3), Fraction(10**17, 3), Fraction(1, 10**17)):
        s = Schedule("scaled", 2, 1, (Step((Scale(range(2), range(1), factor),), ""),))
        assert from_text(to_text(s)) == s
        assert from_json(to_json(s)) == s
