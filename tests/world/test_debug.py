"""PHALANX_DEBUG=1: ranks that disagree get an error on all ranks that names them, and nothing is broken by it."""

import pytest
import torch
from tests.world.test_reductions import LARGE, equal

import phalanx


def disagree(comm, what, odd):
    n, r = comm.size, comm.rank
    calls = {
        "shape": (lambda: comm.all_reduce(torch.ones(5)), lambda: comm.all_reduce(torch.ones(6))),
        "large shape": (lambda: comm.all_reduce(torch.ones(LARGE)), lambda: comm.all_reduce(torch.ones(LARGE + 1))),
        "dims": (lambda: comm.all_reduce(torch.ones(2, 3)), lambda: comm.all_reduce(torch.ones(3, 2))),
        "dtype": (lambda: comm.all_reduce(torch.ones(5)), lambda: comm.all_reduce(torch.ones(5, dtype=torch.float64))),
        "op": (lambda: comm.all_reduce(torch.ones(5)), lambda: comm.all_reduce(torch.ones(5), "max")),
        "verb": (lambda: comm.all_reduce(torch.ones(5)), comm.barrier),
        "root": (lambda: comm.bcast(torch.ones(5), 0), lambda: comm.bcast(torch.ones(5), 1)),
        "async": (lambda: comm.all_reduce_async(torch.ones(5)).wait(), lambda: comm.all_reduce_async(torch.ones(4)).wait()),
    }
    usual, other = calls[what]
    with pytest.raises(phalanx.CommunicationError) as caught:
        (other if r == odd else usual)()
    equal(comm.all_reduce(torch.ones(4)), torch.full((4,), float(n)))
    assert comm.allgather_obj(r) == list(range(n))
    return str(caught.value), caught.value.missing


@pytest.mark.parametrize("what", ["shape", "large shape", "dims", "dtype", "op", "verb", "root", "async"])
def test_a_disagreement_is_an_error_on_all_ranks_that_names_who_disagrees(debug_world, what):
    n = debug_world.size
    for odd in {n - 1, 0 if n > 2 else n - 1}:  # of two, nobody can say who is odd: the second counts as it
        answers = debug_world.run(disagree, what, odd)
        for text, missing in answers:
            assert missing == (odd,)
            assert f"rank {odd}: " in text
        assert len(set(answers)) == 1


def disagree_in_a_child(comm):
    child = comm.split(0, key=-comm.rank)
    with pytest.raises(phalanx.CommunicationError, match="disagree"):
        child.all_reduce(torch.ones(5 + (comm.rank == 0)))
    equal(child.all_reduce(torch.ones(4)), torch.full((4,), float(comm.size)))
    comm.barrier()


def test_a_child_compares_too(debug_world):
    debug_world.run(disagree_in_a_child)


def agree(comm):
    n, r = comm.size, comm.rank
    equal(comm.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(n)))
    assert [len(x) for x in comm.allgather(torch.ones(r))] == list(range(n))  # shapes may differ here
    assert comm.gather(torch.ones(r), n - 1) is None or r == n - 1
    equal(comm.bcast(torch.ones(3) if r == 0 else None), torch.ones(3))
    equal(comm.scatter([torch.ones(q) for q in range(n)] if r == 0 else None), torch.ones(r))
    if r == 0:
        comm.send(torch.ones(3), n - 1)
    elif r == n - 1:
        equal(comm.recv(0), torch.ones(3))
    comm.barrier()


def test_negative_control_ranks_that_agree_are_left_in_peace(debug_world):
    debug_world.run(agree)
