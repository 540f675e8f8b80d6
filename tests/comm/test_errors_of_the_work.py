"""An error of the work itself is not a broken network: it is raised as it is, and the communicator works on."""

import pytest
import torch

import phalanx
from phalanx import CommunicationError

TOO_MUCH = 1 << 47  # float32 elements: more than any address space holds


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_reduction_that_runs_out_of_memory_harms_nothing_else(ranks):
    def play(comm):
        huge = torch.zeros(1).expand(TOO_MUCH * comm.size)  # costs nothing, until it is copied
        for _ in range(2):
            with pytest.raises(RuntimeError, match="allocate") as caught:
                comm.reduce_scatter(huge)
            assert not isinstance(caught.value, CommunicationError)
        return comm.all_reduce(torch.ones(1)).item()

    assert phalanx.run_local(ranks, play) == [float(ranks)] * ranks


def test_the_others_learn_which_rank_failed_and_why():
    told = []

    def play(comm):
        try:
            comm.reduce_scatter(torch.zeros(1).expand(2 * TOO_MUCH if comm.rank == 1 else 2))
        except CommunicationError as error:
            told.append((error.missing, str(error)))

    with pytest.raises(RuntimeError, match="allocate"):
        phalanx.run_local(2, play, timeout=20)
    [(missing, words)] = told
    assert missing == (1,)
    assert "rank 1 raised RuntimeError" in words
