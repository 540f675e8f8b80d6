"""Tensors that pass the staging area in one piece, in several, and in pieces that do not fit: the results are exact."""

import threading

import pytest
import torch

from phalanx.native import core
from phalanx.native.team import HostTeam

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")


def on_ranks(n, work):
    """`work(team)` on `n` ranks that are threads of this process; what each returned."""
    first = core._native.Team(0, n, None, 0, 30.0)
    made = [first, *(core._native.Team(rank, n, first.place, 0, 30.0) for rank in range(1, n))]
    results = [None] * n

    def play(rank):
        made[rank].meet()
        results[rank] = work(HostTeam(made[rank], rank, n, 30.0, [0] * n))

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in made:
        each.leave()
    assert None not in results
    return results


def counts(n, width):
    """Elements around the limits of a piece, of a part's piece, and of a tensor that passes in one."""
    bytes_of = {core._native.whole_bytes(n), core._native.third_bytes(n)}
    around = {k * size // n // 64 * 64 * n // width + d for size in bytes_of for k in (1, 2) for d in (-1, 0, 1, n, n + 1)}
    return sorted({0, 1, n - 1, n + 1, *around})


def values(rank, count, dtype):
    whole = torch.arange(count, dtype=torch.int64) * (rank + 1) + rank
    return (whole % 11).to(dtype)


@pytest.mark.parametrize("long_pieces", [False, True])
@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float32), (3, torch.uint8), (5, torch.float64)], ids=["2", "3", "5"])
def test_every_length_is_reduced_scattered_and_gathered(n, dtype, long_pieces):
    lengths = counts(n, dtype.itemsize)

    def work(team):
        if long_pieces:
            team.set_long_pieces()
        wrong = []
        for count in lengths:
            inputs = [values(rank, count, dtype) for rank in range(n)]
            sums = torch.stack(inputs).sum(0, dtype=dtype)
            x = inputs[team.rank].clone()
            mine = team.reduce_scatter(x)
            others = torch.ones(count, dtype=torch.bool)
            others[team.rank * count // n : (team.rank + 1) * count // n] = False
            if not torch.equal(mine, team.part(sums, team.rank)) or not torch.equal(x[others], inputs[team.rank][others]):
                wrong.append(("reduce_scatter", count))
            if not torch.equal(team.all_gather(x), sums):
                wrong.append(("all_gather", count))
            if not torch.equal(team.all_reduce(inputs[team.rank].clone()), sums):
                wrong.append(("all_reduce", count))
        return wrong

    assert on_ranks(n, work) == [[]] * n
