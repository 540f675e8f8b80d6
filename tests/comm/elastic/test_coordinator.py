"""What members read on the board after the coordinator has looked."""

from __future__ import annotations

import pytest

from phalanx.comm.elastic.agreement import Proposal
from phalanx.comm.elastic.board import Ready
from phalanx.comm.elastic.coordinator import Coordinator

READY = Ready()


def begin(board, size, ready=READY, **options):
    coordinator = Coordinator(board, first=size, **options)
    for member in range(size):
        come(coordinator, member, ready)
    coordinator.look()
    return coordinator


def come(coordinator, member, ready=READY):
    coordinator.expect(member)
    coordinator.board.be_ready(member, ready)


def stand(coordinator, *members):
    for member in members:
        coordinator.board.stand(coordinator.proposal.epoch, member)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_death_at_the_moment_when_a_newcomer_comes_in_is_seen_by_all(board, size):
    """One look raises the number of the world twice: members look for the next number, and must find it."""
    coordinator = begin(board, size)
    stand(coordinator, *range(size - 1))
    come(coordinator, size)
    coordinator.look()
    assert coordinator.roster.waiting == (size,)
    stand(coordinator, size - 1)
    coordinator.look({0: "was killed"})
    survivors = tuple(range(1, size))
    assert board.newest(1) == Proposal(2, survivors, left=((0, "was killed"),)) == coordinator.proposal
    stand(coordinator, *survivors)
    coordinator.look()
    assert board.newest(2) == Proposal(3, (*survivors, size), joined=(size,))


def test_a_death_right_after_a_pause_is_seen_by_all(board):
    coordinator = Coordinator(board, first=3, needs=4)
    for member in range(3):
        come(coordinator, member)
    coordinator.look()
    stand(coordinator, 0, 1, 2)
    coordinator.look()
    coordinator.needs = 0
    coordinator.resume()
    coordinator.look({1: "was killed"})
    assert board.newest(1) == Proposal(2, (0, 2), left=((1, "was killed"),))


def test_what_members_of_old_worlds_wrote_is_removed(board):
    coordinator = begin(board, 8)
    for dead in range(5):
        stand(coordinator, *coordinator.proposal.members)
        coordinator.look({dead: "was killed"})
    assert [epoch for epoch in range(1, 7) if board.stood(epoch, 7)] == [4, 5]


def test_ranks_beyond_the_most_wait(board):
    coordinator = begin(board, 4, Ready(most=2))
    assert board.newest(0) == Proposal(1, (0, 1))
    stand(coordinator, 0, 1)
    coordinator.look()
    coordinator.look({0: "was killed"})
    stand(coordinator, 1)
    coordinator.look()
    assert board.newest(1) == Proposal(3, (1, 2), joined=(2,))
