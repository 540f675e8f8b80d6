"""What verbs refuse before anything is sent: True for a rank or a tag, a tensor of too many dimensions, a wait without end."""

import pytest
import torch

import phalanx
from phalanx.comm.envelope import HEADER, MOST_DIMS, announced, header_of
from phalanx.comm.settings import LONGEST


def refused(call):
    """What `call` raised, as text; the deadline of the test would be the communicator's."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("odd", [True, False, 1.0, "1", None, -1, 2, 10**400])
def test_a_rank_is_a_whole_number_of_this_world(odd):
    def play(comm):
        x = torch.ones(2)
        for call in (
            lambda: comm.send(x, odd),
            lambda: comm.recv(odd),
            lambda: comm.bcast(x, root=odd),
            lambda: comm.gather(x, root=odd),
            lambda: comm.scatter([x, x], root=odd),
            lambda: comm.bcast_obj(1, root=odd),
            lambda: comm.send_obj(1, odd),
            lambda: comm.recv_obj(odd),
            lambda: comm.exchange_async(x, odd, x.clone(), odd),
        ):
            assert "is not a rank of this communicator: 0 to 1" in refused(call)

    phalanx.run_local(2, play, timeout=30)


@pytest.mark.parametrize("odd", [True, 1.0, "1", None])
def test_a_tag_is_a_whole_number(odd):
    def play(comm):
        x, other = torch.ones(2), 1 - comm.rank
        for call in (
            lambda: comm.send(x, other, tag=odd),
            lambda: comm.recv(other, tag=odd),
            lambda: comm.send_obj(1, other, tag=odd),
            lambda: comm.recv_obj(other, tag=odd),
            lambda: comm.exchange_async(x, other, x.clone(), other, odd),
        ):
            assert "a whole number, the same on both ranks" in refused(call)

    phalanx.run_local(2, play, timeout=30)


def test_colors_that_are_equal_meet():
    def play(comm):
        part = comm.split(comm.rank == 1 if comm.rank else 0, key=True)
        mine = comm.split(True if comm.rank else 1)  # one colour, written in two ways
        return part.size, mine.all_reduce(torch.ones(1)).item()

    assert phalanx.run_local(2, play, timeout=30) == [(1, 2.0), (1, 2.0)]


@pytest.mark.parametrize("dims", [MOST_DIMS, MOST_DIMS + 1, 70, 200])
def test_a_tensor_has_room_in_its_header_or_stays(dims):
    x = torch.ones(1).view([1] * dims)
    if dims <= MOST_DIMS:
        assert header_of(x).numel() == HEADER
        assert announced(header_of(x), None).shape == x.shape
        assert phalanx.run_local(2, lambda comm: comm.bcast(x if comm.rank == 0 else None).dim(), timeout=30) == [dims, dims]
        return

    def play(comm):
        for call in (comm.bcast, comm.all_reduce, comm.gather, comm.allgather, lambda x: comm.send(x, 1 - comm.rank)):
            assert f"cannot send a tensor of {dims} dimensions, at most {MOST_DIMS}" in refused(lambda call=call: call(x))

    phalanx.run_local(2, play, timeout=30)


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), 0, -1, 1e300, 10**400, LONGEST * 2, "60", None, True])
def test_a_wait_has_an_end(odd):
    assert f"timeout={odd!r}: use" in refused(lambda: phalanx.create_communicator(timeout=odd))
    assert f"timeout={odd!r}: use" in refused(lambda: phalanx.run_local(1, lambda comm: None, timeout=odd))


def test_the_longest_wait_is_one_that_every_clock_takes():
    assert phalanx.run_local(2, lambda comm: comm.all_reduce(torch.ones(1)).item(), timeout=LONGEST) == [2.0, 2.0]
