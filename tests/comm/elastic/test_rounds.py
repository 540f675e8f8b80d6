"""What a rank does between two steps. The worlds that it is offered are made here, and have no connections of their own."""

from __future__ import annotations

import pytest

import phalanx
from phalanx.comm.elastic.agreement import Conclusion, Proposal, Verdict
from phalanx.comm.elastic.board import Ready
from phalanx.comm.elastic.passage import Crossing
from phalanx.comm.elastic.world import World
from phalanx.comm.failure import CommunicationError


@pytest.fixture
def comm():
    with phalanx.create_communicator(elastic=True) as made:
        yield made


class Offered(World):
    """A world that records its end."""

    closed = False

    def close(self):
        self.closed = True


def crossing(comm, proposal, *, between=True, verdict=Verdict.REDO):
    world = Offered(proposal, comm.member, comm._world.connection, ())
    return Crossing(world, Conclusion(0, (verdict,) * world.connection.members.size, 0, between=between), ())


def offer(comm, monkeypatch, *crossings):
    """The coordinator offers these worlds, one after the other."""
    left = list(crossings)
    monkeypatch.setattr(comm._passage.guard, "newer_than", lambda epoch: left[0].world.proposal if left else None)
    monkeypatch.setattr(comm._passage, "_next", lambda epoch: left[0].world.proposal)
    monkeypatch.setattr(comm._passage, "_enter", lambda proposal, **how: left.pop(0))
    return left


@pytest.mark.parametrize(("least", "needs"), [(2, 0), (1, 2)], ids=["min_ranks", "majority"])
def test_ranks_wait_through_all_changes_until_there_are_enough(comm, monkeypatch, least, needs):
    comm._passage.ready = Ready(least)
    worlds = [Proposal(epoch, (0,), needs=needs) for epoch in (2, 3)] + [Proposal(4, (0, 1), needs=needs)]
    monkeypatch.setattr(comm, "_wanted", 2)
    left = offer(comm, monkeypatch, *(crossing(comm, proposal) for proposal in worlds))
    comm.between_steps()
    assert not left


def test_no_rank_waits_if_another_one_is_in_the_next_step(comm, monkeypatch):
    """It cannot wait any more, so the others have to make this step with it."""
    comm._passage.ready = Ready(2)
    left = offer(comm, monkeypatch, crossing(comm, Proposal(2, (0,)), between=False), crossing(comm, Proposal(3, (0, 1))))
    comm.between_steps()
    assert len(left) == 1
    comm.between_steps()  # the step was not made in the new world yet
    assert len(left) == 1


def test_a_failed_attempt_to_join_leaves_no_world(comm, monkeypatch):
    comm._passage.is_new = True
    failed, joined = (crossing(comm, Proposal(epoch, (0,))) for epoch in (2, 3))
    offer(comm, monkeypatch, failed, joined)
    monkeypatch.setattr(comm._passage.guard, "newer_than", lambda epoch: None)  # no death: the connections were at fault

    def heal(found):
        if found is failed:
            raise CommunicationError("a rank died", operation="elastic")

    monkeypatch.setattr(comm, "_heal", heal)
    comm.share(dict, lambda state: None)
    assert comm.membership.epoch == 3
    assert (failed.world.closed, joined.world.closed) == (True, False)
    assert (comm._passage.board.broken(2), comm._passage.board.broken(3)) == (True, False)
