"""The quantised all-reduce: sums, roundings and equal bits are proved, bytes are counted, and mutants are rejected."""

from dataclasses import replace
from fractions import Fraction

import pytest
from tests.long import LONG

from phalanx.schedule import (
    Collective,
    Move,
    Recode,
    Scale,
    Schedule,
    ScheduleError,
    Step,
    from_json,
    from_text,
    latency_steps,
    lower,
    quantised,
    relabel,
    sent,
    show,
    to_json,
    to_text,
    torus,
    verify,
)

SHAPES = [(hosts, per_host) for hosts in (1, 2, 3, 4, 5, 8) for per_host in (1, 2, 3, 4) if hosts * per_host <= 16]


def of(*steps, world=2, chunks=1, goal="sum"):
    return Schedule("mine", world, chunks, tuple(Step(tuple(ops)) for ops in steps), goal)


def error(s):
    with pytest.raises(ScheduleError) as caught:
        verify(s)
    return str(caught.value)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_it_is_an_all_reduce_at_both_levels_in_all_forms(shape):
    s = quantised(*shape)
    for form in (s, lower(s), relabel(s, list(reversed(range(s.world))))):
        verify(form)
        assert from_text(to_text(form)) == form
        assert from_json(to_json(form)) == form
    assert s.coded == (shape[0] > 1)
    show(s)


def test_every_world_up_to_64_ranks():
    for n in range(1, 65) if LONG else (1, 2, 7, 13, 32, 64):
        verify(quantised(n))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_bytes_between_hosts_are_those_of_a_torus_times_the_size_of_the_code(shape):
    hosts, per_host = shape
    code = Fraction(65, 256)

    def between(src, dst):
        return src // per_host != dst // per_host

    plain = sent(torus(hosts, per_host), between)
    assert sent(quantised(hosts, per_host), between, code=code) == tuple(code * share for share in plain)

    def inside(src, dst):
        return not between(src, dst)

    assert sent(quantised(hosts, per_host), inside, code=code) == sent(torus(hosts, per_host), inside)
    assert latency_steps(quantised(hosts, per_host)) == 2 * (per_host - 1) + 2 * (hosts > 1)


def test_no_host_or_no_rank_is_refused():
    for shape in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(ValueError, match="at least 1 host"):
            quantised(*shape)


ENCODE, DECODE = Recode(range(2), range(1), coded=True), Recode(range(2), range(1), coded=False)
THERE = (Move(0, 1, range(1), reduce=True, coded=True),)


@pytest.mark.parametrize(
    ("s", "fact"),
    [
        (of([Move(0, 1, range(1), coded=True)]), "carries a code, but no step encodes anything"),
        (of([ENCODE], [Move(0, 1, range(1))]), "rank 0 does not hold these chunks in full precision"),
        (of([Recode(range(1), range(1), coded=True)], [Move(1, 0, range(1), coded=True)]), "does not hold these chunks encoded"),
        (of([ENCODE], THERE), "rank 1 cannot add to a code"),
        (of([ENCODE], [ENCODE]), "rank 0 holds some of these chunks encoded already"),
        (of([ENCODE], [DECODE], [DECODE]), "rank 0 holds some of these chunks decoded already"),
        (of([ENCODE], [Scale(range(2), range(1), Fraction(1, 2))]), "rank 0 holds some of these chunks encoded; decode"),
        (of([ENCODE], [Collective("all_reduce", (0, 1), range(1))]), "rank 0 holds some of these chunks encoded; decode"),
        (of([ENCODE]), "ends encoded"),
        (of([ENCODE, Recode(range(1, 3), range(1), coded=True)]), "rank 2 is not in a world of 2"),
        (of([ENCODE, Recode(range(1), range(1), coded=True)]), "written twice in one step"),
    ],
)
def test_a_code_is_used_as_one(s, fact):
    assert fact in error(s)


def test_a_contribution_is_rounded_at_most_twice():
    all_reduce = Collective("all_reduce", (0, 1), range(1))
    twice = of([ENCODE], [DECODE], [all_reduce], [ENCODE], [DECODE])
    verify(twice)
    assert "encoded 3 times" in error(replace(twice, steps=(*twice.steps[:2], *twice.steps)))


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (4, 1)])
def test_a_sum_that_its_owner_does_not_round_differs_from_what_the_others_get(shape):
    """As an eager optimisation would have it: the owner keeps the exact sum and sends its code."""
    s = quantised(*shape)
    own = {op.ranks.start: op.chunks for op in s.steps[-3 if shape[1] == 1 else -4].ops}
    decode = s.steps[-1 if shape[1] == 1 else -2]
    exact = []
    for op in decode.ops:
        keeps = own[op.ranks.start]
        exact += [replace(op, chunks=part) for part in (op.chunks[: keeps.start - op.chunks.start],) if part]
        exact += [replace(op, chunks=part) for part in (op.chunks[keeps.stop - op.chunks.start :],) if part]
    at = s.steps.index(decode)
    mutant = replace(s, steps=(*s.steps[:at], Step(tuple(exact)), *s.steps[at + 1 :]))
    with pytest.raises(ScheduleError, match=r"ends encoded|encoded; decode them first"):
        verify(mutant)
    # and where it sends the code of its sum but adds what it had before once more, the sum itself is wrong
    back = s.steps[at - 1]
    doubled = replace(s, steps=(*s.steps[: at - 1], replace(back, ops=back.ops[1:]), *s.steps[at:]))
    with pytest.raises(ScheduleError):
        verify(doubled)


def test_ranks_that_round_for_themselves_end_with_different_bits():
    """Both have the right sum, each made of the other's rounded and its own exact numbers."""
    pairs = of(
        [ENCODE],
        [Move(0, 1, range(1), coded=True)],
        [DECODE],
        world=2,
        goal="copy",
    )
    verify(pairs)  # one code for both
    alone = of(
        [Move(0, 1, range(1))], [Recode(range(1), range(1), coded=True)], [Recode(range(1), range(1), coded=False)], goal="copy"
    )
    assert "chunk 0 is code(x0) on rank 0 and x0 on rank 1" in error(alone)


def test_the_picture_shows_codes():
    picture = show(quantised(2))
    for word in ("q1", "1'→1", "+0'←1", "encodes its chunk 3, which rounds it"):
        assert word in picture
    assert "'" not in show(torus(2, 2))
