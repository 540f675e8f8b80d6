"""Tensors that pass the staging area in one piece, in several, and with a shorter last one: the results are exact."""

import random
import threading

import pytest
import torch
from tests.long import times

from phalanx.native import core
from phalanx.native.errors import Disagreement
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


@pytest.mark.parametrize("n", [3, 5, 6, 7])
def test_an_all_reduce_whose_last_piece_is_some_cache_lines_shorter(n):
    """A rank's slice is a number of whole lines, so the last rank's slice of a shorter piece may be longer than of a full one."""
    third, whole = core._native.third_bytes(n), core._native.whole_bytes(n)
    pieces = whole // third + 2
    lengths = [(pieces * third - lines * 64) // 4 + d for lines in range(2 * n) for d in (0, 5)]

    def work(team):
        wrong = []
        for count in lengths:
            inputs = [values(rank, count, torch.float32) for rank in range(n)]
            if not torch.equal(team.all_reduce(inputs[team.rank].clone()), torch.stack(inputs).sum(0)):
                wrong.append(count)
        return wrong

    assert on_ranks(n, work) == [[]] * n


def test_ranks_that_cut_into_different_pieces_disagree():
    def work(team):
        if team.rank:
            team.set_long_pieces()
        with pytest.raises(Disagreement):
            team.all_reduce(torch.zeros(1 << 20))
        return True

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("seed", range(times(40, seldom=3)))
def test_any_length_on_any_number_of_ranks(seed):
    """Lengths near multiples of a piece, where slices and parts have their odd sizes, and far from them."""
    draw = random.Random(seed)
    n, long_pieces = draw.choice((2, 3, 4, 5, 6, 7, 9, 12, 13)), draw.random() < 0.3
    piece = (core._native.whole_bytes if long_pieces else core._native.third_bytes)(n)
    cases = []
    for _ in range(10):
        dtype = draw.choice((torch.float32, torch.float64, torch.float16, torch.int8, torch.int64))
        near = piece * draw.randrange(1, 14) + draw.choice((-1, 1)) * draw.randrange(n * 160)
        nbytes = draw.choice((near, draw.randrange(1 << draw.randrange(4, 22))))
        cases.append((dtype, nbytes // dtype.itemsize, draw.choice(("sum", "max", "min"))))

    def work(team):
        if long_pieces:
            team.set_long_pieces()
        wrong = []
        for dtype, count, op in cases:
            inputs = torch.stack([values(rank, count, dtype) for rank in range(n)])
            whole = inputs.sum(0, dtype=dtype) if op == "sum" else getattr(inputs, f"a{op}")(0)
            if not torch.equal(team.all_reduce(inputs[team.rank].clone(), op), whole):
                wrong.append(("all_reduce", dtype, count, op))
            x = inputs[team.rank].clone()
            mine = team.reduce_scatter(x, op)
            if not torch.equal(mine, team.part(whole, team.rank)) or not torch.equal(team.all_gather(x), whole):
                wrong.append(("reduce_scatter", dtype, count, op))
        return wrong

    assert on_ranks(n, work) == [[]] * n
