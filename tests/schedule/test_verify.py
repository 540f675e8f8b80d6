"""The checker: what it accepts, what it says when it does not, and how fast it is."""

import time
from dataclasses import replace
from fractions import Fraction

import pytest
from tests.long import only_long

from phalanx.schedule import (
    Collective,
    Move,
    Scale,
    Schedule,
    ScheduleError,
    Step,
    binomial,
    chain,
    gossip,
    hierarchical,
    lower,
    recursive_doubling,
    ring,
    torus,
    tree,
    verify,
)
from phalanx.schedule.fingerprints import PRIME
from phalanx.schedule.verify import verify_lowered

HALF = Fraction(1, 2)


def of(*steps, world=3, chunks=2, goal="sum", root=0):
    return Schedule("mine", world, chunks, tuple(Step(tuple(ops)) for ops in steps), goal, root)


def replaced(s, number, old, *new):
    """`s` with one op of step `number`, counted from 1, exchanged."""
    step = s.steps[number - 1]
    at = step.ops.index(old)
    ops = (*step.ops[:at], *new, *step.ops[at + 1 :])
    return replace(s, steps=(*s.steps[: number - 1], replace(step, ops=ops), *s.steps[number:]))


def error(s, **options):
    with pytest.raises(ScheduleError) as caught:
        verify(s, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("s", "message"),
    [
        (of([Move(0, 3, range(1))]), "mine: rank 3 is not in a world of 3 (step 1: Move(0 -> 3, 0))"),
        (of([], [Move(-1, 2, range(1))]), "mine: rank -1 is not in a world of 3 (step 2: Move(-1 -> 2, 0))"),
        (of([Move(1, 1, range(1))]), "mine: rank 1 sends to itself (step 1: Move(1 -> 1, 0))"),
        (
            of([Move(0, 1, range(1, 3), reduce=True)]),
            "mine: chunks range(1, 3) are not a non-empty run of the 2 chunks (step 1: Move(0 -> 1, 1-2, reduce))",
        ),
        (
            of([Move(0, 1, range(0))]),
            "mine: chunks range(0, 0) are not a non-empty run of the 2 chunks (step 1: Move(0 -> 1, range(0, 0)))",
        ),
        (of([Move(0, 1, range(0, 2, 2))]), "mine: chunks range(0, 2, 2) are not a non-empty run"),
        (of([Move(0, 1, range(-1, 1))]), "mine: chunks range(-1, 1) are not a non-empty run"),
        (of([Collective("all_reduce", (), range(2))]), "mine: the group is empty (step 1: Collective(all_reduce of , 0-1))"),
        (
            of([Collective("all_reduce", (0, 1, 0), range(2))]),
            "mine: rank 0 is in the group twice (step 1: Collective(all_reduce of 0 1 0, 0-1))",
        ),
        (of([Collective("reduce", (0, 5), range(2))]), "mine: rank 5 is not in a world of 3"),
        (of([Collective("shuffle", (0, 1), range(2))]), "mine: kind 'shuffle' is none of all_reduce, reduce_scatter"),
        (of([Collective("reduce_scatter", (0, 1, 2), range(2))]), "mine: 2 chunks cannot be cut into 3 equal parts"),
        (of([Scale(range(3), range(2), Fraction(-1, 2))]), "mine: the factor -1/2 is negative (step 1: Scale(0-2, 0-1, -1/2))"),
        (of([Scale(range(3), range(2), 0.5)]), "mine: the factor 0.5 is not a Fraction"),
        (of([Scale(range(2, 4), range(2), HALF)]), "mine: rank 3 is not in a world of 3"),
        (of([Scale(range(0), range(2), HALF)]), "mine: it names no rank"),
        (of(world=0), "mine: world 0 and chunks 2 must both be at least 1"),
        (of(chunks=0), "mine: world 3 and chunks 0 must both be at least 1"),
        (of(goal="copy", root=3), "mine: root 3 is not a rank of a world of 3"),
        (of(goal="median"), "mine: goal 'median' is none of sum, mean, mixing, copy"),
        (
            of([Collective("reduce", (0, 1), range(1)), Collective("reduce", (1, 2), range(1, 2))]),
            "mine: rank 1 is in two collectives of one step"
            " (step 1: Collective(reduce of 0 1, 0) and Collective(reduce of 1 2, 1))",
        ),
    ],
)
def test_malformed_schedules_are_rejected_with_the_facts(s, message):
    assert error(s).startswith(message)


@pytest.mark.parametrize(
    "ops",
    [
        [Move(0, 1, range(2)), Move(2, 1, range(1, 2))],
        [Move(0, 1, range(2)), Move(2, 1, range(1, 2), reduce=True)],
        [Move(0, 1, range(2), reduce=True), Move(2, 1, range(1, 2))],
        [Move(0, 1, range(1, 2)), Scale(range(1, 2), range(2), HALF)],
        [Move(0, 1, range(1, 2), reduce=True), Scale(range(3), range(2), HALF)],
        [Scale(range(2), range(2), HALF), Scale(range(1, 3), range(1, 2), HALF)],
        [Collective("all_reduce", (0, 1), range(2)), Move(2, 1, range(1, 2), reduce=True)],
        [Collective("broadcast", (1, 0), range(2)), Scale(range(1, 2), range(1, 2), HALF)],
        [Move(0, 1, range(2), reduce=True), Move(0, 1, range(1), reduce=True), Move(2, 1, range(1, 2))],
    ],
)
def test_two_writers_of_a_slot_are_rejected_unless_both_add(ops):
    for order in (ops, ops[::-1]):
        message = error(of(order))
        assert "of rank 1 is written twice in one step (step 1: " in message
        assert " and " in message


def test_several_adders_and_disjoint_writers_are_fine():
    verify(
        of([Move(1, 0, range(2), reduce=True), Move(2, 0, range(2), reduce=True)], [Move(0, 1, range(2)), Move(0, 2, range(2))])
    )
    apart = [Move(0, 2, range(1)), Move(1, 2, range(1, 2)), Collective("all_reduce", (0, 1), range(2))]
    assert "written twice" not in error(of(apart))


def test_ops_read_the_state_before_their_step():
    verify(of([Move(0, 1, range(1), reduce=True), Move(1, 0, range(1), reduce=True)], world=2, chunks=1))
    rotate = of([Move(0, 1, range(1)), Move(1, 2, range(1)), Move(2, 0, range(1))], chunks=1)
    assert "chunk 0 of rank 0 ends as x2," in error(rotate)


def test_the_error_shows_the_formal_sum_and_the_last_writer():
    broken = replaced(lower(torus(3, 2)), 2, Move(1, 3, range(5, 6), reduce=True), Move(1, 3, range(5, 6)))
    assert error(broken) == (
        "torus(3x2): chunk 5 of rank 0 ends as x0 + x1 + x4 + x5, wanted x0 + ... + x5 (step 6: Move(1 -> 0, 3-5))"
    )


def test_weights_other_than_one_are_shown():
    twice = of([Move(1, 0, range(2), reduce=True)], [Move(1, 0, range(1, 2), reduce=True)], [Move(0, 1, range(2))], world=2)
    assert error(twice) == "mine: chunk 1 of rank 0 ends as x0 + 2*x1, wanted x0 + x1 (step 2: Move(1 -> 0, 1, reduce))"
    halved = of([Scale(range(2), range(2), HALF), Move(1, 0, range(2), reduce=True)], world=3)
    assert "written twice" in error(halved)
    untouched = of([Move(1, 0, range(2), reduce=True)], world=2)
    assert error(untouched) == "mine: chunk 0 of rank 1 ends as x1, wanted x0 + x1 (no step writes it)"


def test_factor_zero_clears():
    s = of([Scale(range(1, 2), range(1), Fraction(0))], [Move(0, 1, range(1), reduce=True)], world=2, chunks=1, goal="copy")
    verify(s)
    assert "ends as 0, wanted x0" in error(replace(s, steps=s.steps[:1]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reduce_scatter", "chunk 1 of rank 0 ends as ?, wanted x0 + x1"),
        ("reduce", "chunk 0 of rank 1 ends as ?, wanted x0 + x1"),
    ],
)
def test_what_a_collective_does_not_promise_is_junk(kind, message):
    assert message in error(of([Collective(kind, (0, 1), range(2))], world=2))


def test_junk_may_be_overwritten_but_not_used():
    reduced = [Collective("reduce", (0, 1, 2), range(2))]
    verify(of(reduced, [Move(0, 1, range(2)), Move(0, 2, range(2))]))
    assert "ends as x0 + x1 + x2 + ?" in error(of(reduced, [Move(0, 1, range(2), reduce=True), Move(0, 2, range(2))]))


def test_goals_differ():
    verify(binomial(5, 2))
    assert "ends as x2, wanted x0 + ... + x4" in error(binomial(5, 2), goal="sum")
    assert error(replace(binomial(5, 2), root=1)).startswith("binomial(5, root=2): chunk 0 of rank 0 ends as x2, wanted x1")
    assert "wanted 1/4*x0 + ... + 1/4*x3" in error(ring(4), goal="mean")
    scaled = of([Scale(range(3), range(2), Fraction(1, 3))], [Collective("all_reduce", (0, 1, 2), range(2))], goal="mean")
    verify(scaled)
    verify(scaled, goal="mixing")  # 1/n everywhere is doubly stochastic
    verify(of(goal="mixing"))  # and so is doing nothing


def test_mixing_needs_both_sums():
    assert error(ring(3), goal="mixing") == (
        "ring(3): chunk 0 of rank 0 ends as x0 + x1 + x2, wanted weights that add up to 1"
        " (step 1: Collective(all_reduce of 0 1 2, 0-2))"
    )
    # each rank ends with weights that add up to 1, but x0 is there twice and x1 is lost
    lost = of([Move(0, 1, range(2))], goal="mixing")
    assert error(lost) == "mine: the weights of x0 in chunk 0 add up to 2 over the ranks, wanted 1"


# large worlds, by fingerprints


def test_large_worlds_pass():
    for s in (ring(65), torus(9, 9), torus(4, 5, 6), hierarchical(10, 13), tree(100), recursive_doubling(130), binomial(200, 77)):
        verify(s)
        verify(lower(s))
    verify(gossip(200, 3))
    verify(chain([gossip(128, k, "hypercube") for k in range(7)], goal="mean"))


def test_large_failures_are_explained_by_formal_sums():
    s = lower(torus(9, 9))
    assert error(replaced(s, 1, Move(0, 1, range(72, 81), reduce=True))).startswith(
        "torus(9x9): chunk 72 of rank 0 ends as x1 + ... + x80, wanted x0 + ... + x80 (step "
    )
    assert "ends as ?" in error(of([Collective("reduce_scatter", tuple(range(70)), range(70))], world=70, chunks=70))
    without_column = torus(9, 9)
    without_column = replaced(without_column, 2, without_column.steps[1].ops[4])
    assert "chunk 36 of rank 0 ends as x0 + ... + x8, wanted x0 + ... + x80" in error(without_column)
    assert error(replace(binomial(100), root=3)) == ("binomial(100): chunk 0 of rank 0 ends as x0, wanted x3 (no step writes it)")


def test_large_mixing_needs_both_sums():
    lost = of([Move(0, 1, range(2))], world=70, goal="mixing")
    assert error(lost) == "mine: the weights of x0 in chunk 0 add up to 2 over the ranks, wanted 1"
    assert "chunk 0 of rank 0 ends as x0 + ... + x69, wanted weights that add up to 1" in error(ring(70), goal="mixing")
    good = gossip(70, 2)
    assert "wanted weights that add up to 1" in error(replace(good, steps=good.steps[1:]))


def test_many_doublings_do_not_wrap_around():
    # x 2^61 is x 1 modulo the Mersenne prime 2^61 - 1; the checker must not be fooled
    doubled = [Step((Scale(range(70), range(1), Fraction(2)),))] * 61
    for times in (60, 61):
        assert "wanted weights that add up to 1" in error(Schedule("big", 70, 1, tuple(doubled[:times]), "mixing"))


def test_a_factor_that_fingerprints_cannot_follow_is_refused():
    s = Schedule("odd", 70, 1, (Step((Scale(range(70), range(1), Fraction(1, PRIME)),)),), "mixing")
    assert "cannot be followed modulo" in error(s)


@only_long
def test_rings_of_4096_as_collective_and_512_as_moves_in_seconds():
    start = time.process_time()
    verify(ring(4096))
    verify(lower(ring(512)))
    assert time.process_time() - start < 15


def test_a_single_fault_among_a_quarter_million_moves_is_found():
    s = lower(torus(16, 64))
    guilty = s.steps[40].ops[700]
    assert isinstance(guilty, Move)
    assert "wanted x0 + ... + x1023" in error(replaced(s, 41, guilty))


def test_the_explanation_of_a_large_failure_needs_neither_time_nor_memory():
    s = recursive_doubling(4096)
    broken = replaced(s, 6, s.steps[5].ops[77])
    start = time.process_time()
    assert error(broken) == (
        "recursive_doubling(4096): chunk 0 of rank 45 ends as x0 + ... + x63 + x96 + ... + x4095, wanted x0 + ... + x4095"
        " (step 12: Move(2093 -> 45, 0, reduce))"
    )
    assert time.process_time() - start < 2


def test_the_moves_of_a_schedule_are_proved_step_by_step_as_they_are_at_once():
    for s in (torus(9, 8), hierarchical(9, 8), torus(2, 3)):
        lowered = lower(s)
        assert verify_lowered(s) == (len(lowered.steps), sum(len(step.ops) for step in lowered.steps))
        wrong = replace(s, steps=s.steps[:-1])
        with pytest.raises(ScheduleError) as at_once:
            verify(lower(wrong))
        with pytest.raises(ScheduleError) as step_by_step:
            verify_lowered(wrong)
        assert str(step_by_step.value) == str(at_once.value)
