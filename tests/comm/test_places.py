"""Large buffers travel in pieces: where an element's result depends on its place, it must end in its place all the same."""

from fractions import Fraction

import pytest
import torch

import phalanx
from phalanx.comm.run import LANE_BYTES, LANES
from phalanx.schedule import Move, Schedule, Step, gossip, gossip_period

COUNTS = [k * LANE_BYTES // 4 + more for k in range(1, LANES + 2) for more in (-1, 0, 1)]  # float32s around every cut


def scatter_sums(comm):
    for count in COUNTS:
        x = torch.arange(comm.size * (count // comm.size + 1)) % 11 + 1
        wanted = (x * comm.size + sum(range(comm.size))).chunk(comm.size)[comm.rank]
        for dtype in (torch.float32, torch.int32):
            assert torch.equal(comm.reduce_scatter((x + comm.rank).to(dtype)), wanted.to(dtype)), (count, dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_reduce_scatter_of_any_size_returns_this_ranks_part(ranks):
    phalanx.run_local(ranks, scatter_sums)


def swap_a_chunk(comm, chunks, swapped):
    """Ranks 0 and 1 exchange some chunks and keep the others: a mixing that differs from chunk to chunk."""
    moves = tuple(Move(*pair, piece) for piece in swapped for pair in ((0, 1), (1, 0)))
    schedule = Schedule("swap", comm.size, chunks, (Step(moves),), goal="mixing")
    for count in COUNTS:
        x = torch.arange(count) + comm.rank * 1000
        wanted = x.clone()
        for piece in swapped if comm.rank < 2 else ():
            first, last = piece.start * count // chunks, piece.stop * count // chunks
            wanted[first:last] = torch.arange(first, last) + (1 - comm.rank) * 1000
        assert torch.equal(comm.run(schedule, x), wanted), count


@pytest.mark.parametrize("swapped", [[range(1)], [range(1, 3)], [range(1), range(2, 3)]])
def test_a_schedule_that_treats_chunks_differently_finds_its_chunks(swapped):
    phalanx.run_local(3, lambda comm: swap_a_chunk(comm, 3, swapped))


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_a_period_of_exact_gossip_run_as_schedules_is_the_mean(n):
    def mix(comm):
        x = torch.arange(10.0, dtype=torch.float64) * (comm.rank + 1)
        wanted = comm.all_reduce(x.clone(), op="mean")
        for number in range(gossip_period(n, "exact")):
            comm.run(gossip(n, number, "exact"), x)
        torch.testing.assert_close(x, wanted, rtol=1e-12, atol=1e-12)
        with pytest.raises(TypeError, match="float"):
            comm.run(
                Schedule("twice", n, 1, (Step((Move(0, 1, range(1), False, Fraction(2)),)),), "copy"),
                torch.ones(4, dtype=torch.int64),
            )

    phalanx.run_local(n, mix)


def test_a_schedule_with_fractions_refuses_integers_and_breaks_nothing():
    def halve(comm):
        with pytest.raises(TypeError, match="float"):
            comm.run(gossip(comm.size, 0), torch.ones(4, dtype=torch.int64))
        assert comm.all_reduce(torch.ones(1)).item() == comm.size

    phalanx.run_local(2, halve)
