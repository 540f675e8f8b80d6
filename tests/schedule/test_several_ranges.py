"""A move that carries several ranges as one message: the value, both file forms, the proof, the price, the run."""

import time

import pytest
import torch
from tests.long import times
from tests.schedule import oracle
from tests.schedule.oracle import paper_swing

import phalanx
from phalanx.cluster import PRESETS, PROFILES, simulate
from phalanx.schedule import (
    Collective,
    Move,
    Schedule,
    ScheduleError,
    Step,
    chain,
    from_json,
    from_text,
    lower,
    lowered_ops,
    sent,
    show,
    swing,
    to_json,
    to_text,
    verify,
)  # fmt: skip


def of(*ops, world=2, chunks=6):
    return Schedule("mine", world, chunks, (Step(tuple(ops)),))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (range(2, 4), range(2, 4)),
        ((range(2, 4),), range(2, 4)),
        ([range(2, 4), range(4, 6)], range(2, 6)),
        ([range(4, 6), range(1)], (range(1), range(4, 6))),
        ([5, 0, 1], (range(2), range(5, 6))),
        ({3, 4}, range(3, 5)),
        ([range(3), range(2, 4)], (range(3), range(2, 4))),  # overlapping: for `verify` to refuse
        ([], ()),
    ],
)
def test_one_value_per_set_of_chunks(given, kept):
    move = Move(0, 1, given)
    assert move.chunks == kept
    assert move == Move(0, 1, kept)
    assert move.runs == ((kept,) if isinstance(kept, range) else kept)
    assert move.count == sum(len(run) for run in move.runs)


@pytest.mark.parametrize("chunks", [(range(3), range(2, 4)), (), (range(1), range(5, 7)), (range(0, 4, 2), 5), ("a",), (None, 1)])
def test_nonsense_is_refused_with_the_facts(chunks):
    with pytest.raises(ScheduleError, match="are not a non-empty run of the 6 chunks"):
        verify(of(Move(0, 1, chunks)))


def test_two_moves_may_not_write_one_chunk_even_if_it_is_in_the_middle_of_one():
    scattered = Move(0, 2, (0, range(2, 4), 5))
    with pytest.raises(ScheduleError, match=r"chunk 3 of rank 2 is written twice .* Move\(0 -> 2, 0,2-3,5\)"):
        verify(of(scattered, Move(1, 2, range(3, 4)), world=3))
    with pytest.raises(ScheduleError, match="wanted"):  # apart: only the sum is wrong
        verify(of(scattered, Move(1, 2, (1, 4)), world=3))
    with pytest.raises(ScheduleError, match="written twice"):
        verify(of(scattered, scattered, world=3))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_swing_of_the_paper_in_both_forms(n):
    one, many = paper_swing(n, together=True), paper_swing(n, together=False)
    for s in (one, many):
        verify(s, bitwise=True)
        assert oracle.sums_everything(s)
    assert sent(one) == sent(many) == sent(swing(n))
    assert from_text(to_text(one)) == one == from_json(to_json(one))


@pytest.mark.parametrize("n", range(1, 18))
def test_swing_has_the_steps_of_the_formula(n):
    s = swing(n)
    verify(s, bitwise=True)
    assert oracle.sums_everything(s)
    core = n.bit_length() - 1
    assert len(s.steps) == 2 * core + 2 * (n != 1 << core)
    assert max(sent(s)) == (2 * (n - 1) / n if n == 1 << core else max(sent(phalanx.halving_doubling(n))))


def test_a_mutant_that_drops_one_run_of_a_message_is_rejected():
    s = paper_swing(8, together=True)
    step = s.steps[0]
    first = step.ops[0]
    assert len(first.runs) > 1
    mutant = Step((Move(first.src, first.dst, first.runs[:-1], reduce=True), *step.ops[1:]))
    with pytest.raises(ScheduleError, match="wanted x0"):
        verify(Schedule("mutant", 8, 8, (mutant, *s.steps[1:])))


def test_text_json_and_picture():
    s = of(Move(0, 1, (range(2), 5)), Move(1, 0, (0, 2, 4), reduce=True))
    assert "copy 0 -> 1 [0:2 5]" in to_text(s)
    assert '"chunks": [[0, 2], [5, 6]]' in to_json(s)
    assert "0-1,5→1 +0,2,4←1" in show(s)
    assert from_text(to_text(s).replace("[0:2 5]", "[5 0 1]")) == s
    for wrong in ("[0:2  5]", "[0:2 ]", "[0:2, 5]", "[]"):
        with pytest.raises(ScheduleError, match="line 7"):
            from_text(to_text(s).replace("[0:2 5]", wrong))
    with pytest.raises(ScheduleError, match="is not a run"):
        from_json(to_json(s).replace("[[0, 2], [5, 6]]", "[[0, 2], [5]]"))


def test_a_finer_cut_keeps_the_meaning():
    s = paper_swing(4, together=True)
    finer = chain([s, Schedule("nothing", 4, 12, ())], goal="sum")
    assert finer.chunks == 12
    verify(finer)


def test_one_message_costs_one_message():
    cluster = PRESETS["lab"].with_ranks(16)

    def price(s):
        return simulate(s, cluster, 1 << 16, profile=PROFILES["gloo"]).end.max()

    assert price(paper_swing(16, together=True)) == pytest.approx(price(swing(16)))
    assert price(paper_swing(16, together=False)) > 1.5 * price(swing(16))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_scattered_messages_arrive(n):
    """On threads; test_algorithms of tests/world runs them on gloo."""
    pieces = [(r, n + r) for r in range(n)]
    everybody = Schedule(
        "scattered", n, 2 * n,
        (
            Step(tuple(Move(src, dst, pieces[dst], reduce=True) for dst in range(n) for src in range(n) if src != dst)),
            Step(tuple(Move(src, dst, pieces[src]) for src in range(n) for dst in range(n) if src != dst)),
        ),
    )  # fmt: skip
    verify(everybody, bitwise=True)

    def play(comm):
        for schedule in (everybody, paper_swing(n, together=True)):
            for count in (0, 1, 2 * n + 1, 4099):
                x = torch.arange(count) * (comm.rank + 1)
                assert torch.equal(comm.run(schedule, x), torch.arange(count) * (n * (n + 1) // 2))
        return True

    assert all(phalanx.run_local(n, play, timeout=20))


def test_the_proof_of_1024_ranks_takes_seconds():
    n = times(1024, seldom=256)
    s = paper_swing(n, together=True)
    start = time.process_time()
    verify(s, bitwise=True)
    assert time.process_time() - start < 5


def test_an_all_reduce_of_any_number_of_chunks_runs_as_moves():
    for n in (1, 2, 3, 5, 8):
        for chunks in (1, 2, 3, 7, 8, 9):
            s = Schedule("any", n, chunks, (Step((Collective("all_reduce", tuple(range(n)), range(chunks)),)),))
            lowered = lower(s)
            verify(lowered, bitwise=True)
            assert lowered_ops(s) == len(list(lowered.ops()))
            assert oracle.sums_everything(lowered)
