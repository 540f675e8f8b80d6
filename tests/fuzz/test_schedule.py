"""Schedules as text and as JSON, and the file that PHALANX_SCHEDULES names: an algorithm comes out, or ScheduleError.

That any schedule survives both forms is in tests/schedule/test_text.py.
"""

import pytest
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import JSON, TEXT

from phalanx.cluster import PRESETS, PROFILES, by_size
from phalanx.comm.planned import parse_planned
from phalanx.schedule import (
    ScheduleError,
    from_json,
    from_msccl,
    from_mscclpp,
    from_text,
    gossip,
    halving_doubling,
    hierarchical,
    lower,
    lowered_ops,
    ring,
    show,
    to_json,
    to_msccl,
    to_mscclpp,
    to_text,
    torus,
    trace,
    tree,
    verify,
)
from phalanx.schedule.limits import work

SEEDS = (
    ring(3), lower(ring(3)), torus(2, 3), lower(torus(2, 2)), hierarchical(2, 2), halving_doubling(4), tree(3), gossip(4, 1),
    ring(1),
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
MSCCL = Parser(
    "MSCCL's XML",
    lambda data: use(from_msccl(data.decode("utf-8", "replace"))),
    (ScheduleError,),
    tuple(to_msccl(s).encode() for s in (ring(3), tree(3), halving_doubling(4), ring(1))),
    TEXT,
)
MSCCLPP = Parser(
    "MSCCL++'s JSON",
    lambda data: use(from_mscclpp(data.decode("utf-8", "replace"))),
    (ScheduleError,),
    tuple(to_mscclpp(s).encode() for s in (ring(2), tree(3), halving_doubling(4), ring(1))),
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
def test_msccl(cases):
    assert set(fuzz(MSCCL, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks())
def test_mscclpp(cases):
    assert set(fuzz(MSCCLPP, cases)) == {"accepted", "refused"}


@pytest.mark.parametrize("cases", blocks())
def test_planned(cases):
    assert set(fuzz(PLANNED, cases)) == {"accepted", "refused"}
