"""Lowering: what collectives become, and what stays as it is."""

from fractions import Fraction

import pytest
from tests.schedule import oracle

from phalanx.schedule import (
    Collective,
    Move,
    Scale,
    Schedule,
    ScheduleError,
    Step,
    gossip,
    hierarchical,
    lower,
    lowered_ops,
    ring,
    scatter_gather,
    torus,
    tree,
    verify,
)


def test_lowering_twice_is_lowering_once():
    for s in (ring(5), torus(2, 3), torus(2, 3, 2), hierarchical(3, 2), scatter_gather(5), tree(6), gossip(6, 1)):
        assert lower(s).lowered
        assert lower(lower(s)) == lower(s)


def test_what_is_lowered_already_is_unchanged():
    assert lower(tree(5)) == tree(5)
    assert lower(gossip(5, 0)) == gossip(5, 0)
    scatter = scatter_gather(4)
    assert lower(scatter).steps[:2] == scatter.steps[:2]


def test_reduce_scatter_is_a_ring_that_ends_at_each_owner():
    s = Schedule("rs", 3, 3, (Step((Collective("reduce_scatter", (2, 0, 1), range(3)),), "scatter"),))
    lowered = lower(s)
    inputs = oracle.integers(s)
    final = oracle.run(lowered, inputs)
    for part, owner in enumerate((2, 0, 1)):
        assert final[owner][part] == sum(row[part] for row in inputs)
    assert [step.label for step in lowered.steps] == ["scatter 1/2", "scatter 2/2"]
    assert all(len(step.ops) == 3 for step in lowered.steps)


def test_reduce_and_broadcast_are_chains_of_the_whole_range():
    group = (3, 1, 2)
    s = Schedule("r", 4, 2, (Step((Collective("reduce", group, range(2)),)), Step((Collective("broadcast", group, range(2)),))))
    assert [step.ops for step in lower(s).steps] == [
        (Move(2, 1, range(2), reduce=True),),
        (Move(1, 3, range(2), reduce=True),),
        (Move(3, 1, range(2)),),
        (Move(1, 2, range(2)),),
    ]


def test_collectives_of_one_step_advance_together():
    lowered = lower(torus(3, 4))
    assert len(lowered.steps) == 2 * 3 + 2 * 2
    assert all(len(step.ops) == 12 for step in lowered.steps)


def test_groups_of_different_sizes_share_the_steps_they_have():
    step = Step((Collective("all_reduce", (0, 1, 2), range(6)), Collective("all_reduce", (3, 4), range(6))))
    assert [len(step.ops) for step in lower(Schedule("uneven", 5, 6, (step,))).steps] == [5, 5, 3, 3]


def test_other_ops_of_the_step_still_read_the_state_before_it():
    # rank 2 fetches what rank 0 held before the all-reduce overwrites it
    ops = (
        Collective("all_reduce", (0, 1), range(2)),
        Move(0, 2, range(2)),
        Scale(range(3, 4), range(2), Fraction(3)),
    )
    s = Schedule("mixed", 4, 2, (Step(ops, "both"),))
    inputs = oracle.integers(s)
    assert oracle.run(lower(s), inputs) == oracle.run(s, inputs)
    assert oracle.run(s, inputs)[2] == inputs[0]


def test_a_group_of_one_becomes_nothing():
    lonely = Collective("all_reduce", (1,), range(1))
    assert lower(Schedule("lonely", 2, 1, (Step((lonely,)),))).steps == ()
    kept = Move(0, 1, range(1))
    with_move = Schedule("with a move", 2, 1, (Step((Collective("reduce", (0,), range(1)), kept), "x"),))
    assert lower(with_move).steps == (Step((kept,), "x"),)


def test_parts_that_cannot_be_equal_are_an_error_where_they_have_owners():
    s = Schedule("odd", 3, 4, (Step((Collective("all_reduce", (0, 1, 2), range(4)),)),))
    verify(s)
    verify(lower(s))
    owned = Schedule("odd", 3, 4, (*s.steps, Step((Collective("all_gather", (0, 1, 2), range(4)),))))
    with pytest.raises(ScheduleError, match=r"odd: all_gather of 4 chunks by 3 ranks cannot be cut .* give .* a multiple of 3"):
        lower(owned)


def test_lowered_ops_counts_what_lower_makes():
    for s in (ring(1), ring(5), torus(2, 3, 2), hierarchical(3, 4), scatter_gather(5), tree(6), gossip(7, 1, "hypercube")):
        assert lowered_ops(s) == len(list(lower(s).ops()))


def test_what_the_backend_can_do_itself_is_kept():
    rows = {(0, 1, 2), (3, 4, 5)}
    s = lower(torus(2, 3), keep=lambda call: call.group in rows)
    assert [op.kind for op in s.ops() if isinstance(op, Collective)] == ["reduce_scatter"] * 2 + ["all_gather"] * 2
    assert len(s.steps) == 4  # the rows in one step each, the columns in two
    verify(s)
    one_row = lower(torus(2, 3), keep=lambda call: call.group == (0, 1, 2))
    verify(one_row)
    assert lower(one_row) == lower(one_row, keep=lambda call: False)
