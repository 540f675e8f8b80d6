"""`project`: what one rank does of a schedule. Put together, the parts of all ranks are the schedule again."""

from dataclasses import replace
from fractions import Fraction

import pytest

from phalanx.comm.parts import Part, Receipt, Sending, joined, project
from phalanx.schedule import (
    Collective,
    Move,
    Recode,
    Scale,
    Schedule,
    Step,
    gossip,
    halving_doubling,
    hierarchical,
    lower,
    quantised,
    recursive_doubling,
    ring,
    torus,
    tree,
)

SOME = [
    ring(5),
    torus(2, 3),
    torus(2, 2, 2),
    hierarchical(2, 3),
    halving_doubling(6),
    tree(7),
    recursive_doubling(5),
    gossip(5, 1),
    quantised(3, 2),
]


@pytest.mark.parametrize(
    "schedule", [form for s in SOME for form in dict.fromkeys([lower(s), s])], ids=lambda s: f"{s.name}-{len(s.steps)}"
)
def test_parts_of_all_ranks_are_the_whole(schedule):
    parts = [project(schedule, rank) for rank in range(schedule.world)]
    moves = [op for op in schedule.ops() if isinstance(op, Move)]
    sent = [(src, m.peer, m.chunks, m.coded) for src, mine in enumerate(parts) for part in mine for m in part.sends]
    received = [
        (r.peer, dst, r.chunks, r.reduce, r.coded) for dst, mine in enumerate(parts) for part in mine for r in part.receipts
    ]
    assert sorted(sent, key=repr) == sorted(((m.src, m.dst, m.chunks, m.coded) for m in moves), key=repr)
    assert sorted(received, key=repr) == sorted(((m.src, m.dst, m.chunks, m.reduce, m.coded) for m in moves), key=repr)
    calls = [(rank, part.collective) for rank, mine in enumerate(parts) for part in mine if part.collective]
    wanted = [(rank, op) for op in schedule.ops() if isinstance(op, Collective) for rank in op.group]
    assert sorted(calls, key=repr) == sorted(wanted, key=repr)
    scales = [(rank, *scale) for rank, mine in enumerate(parts) for part in mine for scale in part.scales]
    wanted = [(rank, op.chunks, op.factor) for op in schedule.ops() if isinstance(op, Scale) for rank in op.ranks]
    assert sorted(scales, key=repr) == sorted(wanted, key=repr)
    recodes = [(rank, *recode) for rank, mine in enumerate(parts) for part in mine for recode in part.recodes]
    wanted = [(rank, op.chunks, op.coded) for op in schedule.ops() if isinstance(op, Recode) for rank in op.ranks]
    assert sorted(recodes, key=repr) == sorted(wanted, key=repr)


@pytest.mark.parametrize("schedule", [lower(s) for s in SOME], ids=lambda s: s.name)
def test_messages_of_a_pair_are_sent_and_received_in_one_order(schedule):
    parts = [project(schedule, rank) for rank in range(schedule.world)]
    for src in range(schedule.world):
        for dst in range(schedule.world):
            sent = [m.chunks for part in parts[src] for m in part.sends if m.peer == dst]
            received = [r.chunks for part in parts[dst] for r in part.receipts if r.peer == src]
            assert sent == received


def test_what_is_written_while_it_is_sent_waits_beside_the_buffer():
    swap = Step((Move(0, 1, range(2)), Move(1, 0, range(1, 3))))
    schedule = Schedule("swap", 2, 4, (swap,), goal="mixing")
    assert project(schedule, 0) == (
        Part(sends=(Sending(1, range(2)),), receipts=(Receipt(1, range(1, 3), reduce=False, direct=False),)),
    )
    apart = Schedule("apart", 2, 4, (Step((Move(0, 1, range(2)), Move(1, 0, range(2, 4)))),), goal="mixing")
    assert project(apart, 0)[0].receipts[0].direct  # nothing of it is being sent: straight into its place


def test_steps_that_do_not_concern_a_rank_are_left_out():
    steps = (Step((Move(0, 1, range(1)),)), Step((Scale(range(1, 3), range(1), Fraction(1, 2)),)), Step((Move(2, 0, range(1)),)))
    schedule = Schedule("s", 4, 1, steps, goal="mixing")
    assert [len(project(schedule, rank)) for rank in range(4)] == [2, 2, 2, 0]


def test_what_a_rank_does_alone_is_done_right_before_it_needs_others():
    plain = project(quantised(3, 2), 1)
    made = joined(plain)
    assert [part.alone for part in plain] == [False, True, False, True, False, True, False]
    assert not any(part.alone for part in made)
    assert [own for part in made for own in (*part.before, replace(part, before=()))] == list(plain)  # nothing else changes
    assert [len(part.before) for part in made] == [0, 1, 1, 1]
    last = joined(project(quantised(3), 1))
    assert last[-1].alone  # what comes last stays
    assert joined(project(ring(4), 0)) == project(ring(4), 0)
