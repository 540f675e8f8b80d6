"""Equal bits on all ranks, proved: for every all-reduce of Phalanx, and for no schedule whose ranks add in different orders."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.long import times
from tests.schedule import oracle
from tests.world.test_algorithms import algorithms

import phalanx
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
    ring,
    scatter_gather,
    torus,
    tree,
    verify,
)  # fmt: skip


def flood(n, *, chunks=1):
    """Every rank sends its input to all others, and each adds them up in the order that begins with its neighbour."""
    ops = (Move((dst + k) % n, dst, range(chunks), reduce=True) for dst in range(n) for k in range(1, n))
    return Schedule(f"flood({n})", n, chunks, (Step(tuple(ops)),))


def in_float32(s):
    """What every rank ends with on random numbers, added as the schedule says, one rounding at a time."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((s.world, s.chunks, 50)).astype(np.float32)
    return oracle.run(s, list(inputs))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8, 9, 12])
def test_every_all_reduce_is_proved_at_both_levels(n):
    for s in (*algorithms(n), binomial(n, n - 1), scatter_gather(n)):
        verify(s, bitwise=True)
        verify(lower(s), bitwise=True)
        ends = in_float32(lower(s))
        assert all(np.array_equal(end, ends[0]) for end in ends)


def test_large_worlds_are_proved():
    for s in (
        ring(4096),
        torus(16, 16),
        tree(100),
        hierarchical(10, 13),
        phalanx.halving_doubling(100),
        phalanx.schedule.swing(100),
    ):
        verify(s, bitwise=True)


@pytest.mark.parametrize("n", [3, 4, 5, 70])
def test_flooding_is_a_sum_but_its_bits_differ(n):
    s = flood(n)
    verify(s)
    with pytest.raises(
        ScheduleError, match=r"do not end with equal bits: chunk 0 is .* on rank 0 and .* on rank 1.*Let one rank add"
    ):
        verify(s, bitwise=True)
    if n <= 5:
        ends = in_float32(s)
        assert not all(np.array_equal(end, ends[0]) for end in ends)


def test_two_ranks_that_swap_and_add_are_equal_since_addition_commutes():
    verify(flood(2), bitwise=True)


def test_the_message_shows_both_sums():
    with pytest.raises(ScheduleError) as caught:
        verify(flood(3), bitwise=True)
    assert "chunk 0 is x2 + (x0 + x1) on rank 0 and x0 + (x1 + x2) on rank 1, which may round differently" in str(caught.value)


def test_a_wrong_sum_is_the_first_thing_to_say():
    with pytest.raises(ScheduleError, match="ends as x0, wanted"):
        verify(Schedule("nothing", 3, 1, ()), bitwise=True)


def test_calls_of_different_groups_are_not_taken_for_equal():
    """Rows, then columns: two calls on equal inputs may add in different orders, but as messages they are one order."""
    rows = Step(tuple(Collective("all_reduce", (2 * i, 2 * i + 1), range(2)) for i in range(2)))
    columns = Step(tuple(Collective("all_reduce", (i, 2 + i), range(2)) for i in range(2)))
    s = Schedule("rows and columns", 4, 2, (rows, columns))
    verify(s)
    with pytest.raises(ScheduleError, match=r"call\(call\(x0, x1\), call\(x2, x3\)\).*or try lower\(schedule\)"):
        verify(s, bitwise=True)
    verify(lower(s), bitwise=True)


def test_gossip_to_the_exact_mean():
    for topology, equal in (("hypercube", True), ("dissemination", False)):
        s = chain([gossip(4, k, topology) for k in range(2)], goal="mean")
        verify(s)
        if equal:
            verify(s, bitwise=True)


def test_what_the_proof_says_is_what_floats_do():
    """Random orders of the same additions: no schedule with the proof has a rank that differs."""
    rng, proved = random.Random(5), 0
    for _ in range(times(400, seldom=60)):
        n = rng.choice([2, 3, 4])
        order = {dst: rng.sample([src for src in range(n) if src != dst], n - 1) for dst in range(n)}
        if rng.random() < 0.4:  # one rank adds, the others copy
            root = rng.randrange(n)
            gather = Step(tuple(Move(src, root, range(1), reduce=True) for src in order[root]))
            s = Schedule("root", n, 1, (gather, Step(tuple(Move(root, dst, range(1)) for dst in range(n) if dst != root))))
        else:
            s = Schedule(
                "all", n, 1, (Step(tuple(Move(src, dst, range(1), reduce=True) for dst in range(n) for src in order[dst])),)
            )
        verify(s)
        try:
            verify(s, bitwise=True)
        except ScheduleError:
            ends = in_float32(s)
            assert not all(np.array_equal(end, ends[0]) for end in ends)
            continue
        proved += 1
        ends = in_float32(s)
        assert all(np.array_equal(end, ends[0]) for end in ends)
    assert proved > 0


def test_replicas_are_refused_such_a_schedule():
    with pytest.raises(ScheduleError, match="do not end with equal bits"):
        phalanx.run_local(3, lambda comm: None, algorithm=flood(3), timeout=10)


def test_run_warns_once_and_runs_it():
    def play(comm):
        total = comm.run(SCHEDULE, torch.ones(4))
        assert total.tolist() == [3.0] * 4
        return comm.run(SCHEDULE, torch.ones(4)).tolist()

    with pytest.warns(UserWarning, match="do not end with equal bits") as caught:
        phalanx.run_local(3, play, timeout=20)
    assert 1 <= len(caught) <= 3  # one per rank at most, however often it runs


SCHEDULE = flood(3)


@pytest.mark.parametrize(
    ("s", "message"),
    [
        (Schedule("s", 2, 1, (Step((Move("0", 1, range(1)),)),)), "rank '0' is not a whole number"),
        (Schedule("s", 2, 1, (Step((Move(0.5, 1, range(1)),)),)), "rank 0.5 is not a whole number"),
        (Schedule("s", 2, 1, (Step((Move(0, None, range(1)),)),)), "rank None is not a whole number"),
        (
            Schedule("s", 2, 1, (Step((Collective("all_reduce", (0, 1.0), range(1)),)),)),
            "rank 1.0 of the group is not a whole number",
        ),
        (
            Schedule("s", 2, 1, (Step((Collective("all_reduce", None, range(1)),)),)),
            "rank None of the group is not a whole number",
        ),
        (Schedule("s", 2, 1, (Step((Collective("all_reduce", ([0], 1), range(1)),)),)), "is not a whole number"),
        (Schedule("s", 2, 1, (Step((Collective("all_reduce", (0, 1), (0,)),)),)), "are not a range"),
        (Schedule("s", 2, 1, (Step((Scale([0, 1], range(1), Fraction(1)),)),)), "ranks .* are not a range"),
        (Schedule("s", 2, 1, (Step((None,)),)), "None is not a Move, Collective, Scale or Recode"),
        (Schedule("s", 2.5, 1, ()), "world 2.5 is not a whole number"),
        (Schedule("s", 2, "1", ()), "chunks '1' is not a whole number"),
        (Schedule("s", 2, 1, (), root=None), "root None is not a whole number"),
        (Schedule("s", 99_999_999_999, 1, ()), "99,999,999,999 ranks; the checker takes at most"),
        (Schedule("s", 2, 1, (Step((Scale(range(2), range(1), Fraction(10**400)),)),)), "beyond what a float32 can hold"),
        (Schedule("s", 2, 1, (Step((Scale(range(2), range(1), Fraction(1, 10**400)),)),)), "beyond what a float32 can hold"),
    ],
)
def test_what_cannot_run_is_refused(s, message):
    with pytest.raises(ScheduleError, match=message):
        verify(s)


@pytest.mark.parametrize("world", [2, 70])
def test_junk_times_zero_is_still_junk(world):
    group = tuple(range(world))
    clear = Step((Scale(range(1, world), range(1), Fraction(0)),))
    s = Schedule(
        "s",
        world,
        1,
        (
            Step((Collective("reduce", group, range(1)),)),
            clear,
            Step(tuple(Move(0, r, range(1), reduce=True) for r in group[1:])),
        ),
    )
    with pytest.raises(ScheduleError, match=r"\?"):
        verify(s)
    copied = Schedule("s", world, 1, (*s.steps[:1], Step(tuple(Move(0, r, range(1)) for r in group[1:]))))
    verify(copied, bitwise=True)
