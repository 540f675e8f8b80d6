"""What runs under inference mode leaves nothing behind that disturbs what runs without it; and layouts of any kind."""

import pytest
import torch

import phalanx


def alternate(comm):
    n = comm.size
    for count in (10, 300_001):
        for inference in (True, False):
            with torch.inference_mode(inference):
                assert torch.equal(comm.all_reduce(torch.ones(count)), torch.full((count,), float(n)))
                assert torch.equal(comm.reduce_scatter(torch.ones(n * count)), torch.full((count,), float(n)))
                assert torch.equal(comm.bcast(torch.ones(count) * comm.rank), torch.zeros(count))
        across, every_other = torch.ones(count, 3).t(), torch.ones(2 * count)
        assert torch.equal(comm.all_reduce(across), torch.full((3, count), float(n)))
        comm.all_reduce(every_other[::2])
        assert torch.equal(every_other.view(-1, 2), torch.tensor([[float(n), 1.0]]).expand(count, 2))
        assert torch.equal(comm.reduce_scatter(torch.ones(3, n * count).t()), torch.full((count, 3), float(n)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_and_without_inference_mode_in_any_layout(ranks):
    phalanx.run_local(ranks, alternate)
