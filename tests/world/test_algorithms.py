"""Every algorithm on real messages: exact on integers, and on random floats the same bits on all ranks.

Each runs on a communicator of its own, made in processes that already have one: it borrows their torch.distributed group, and
leaves it behind when it is closed.
"""

import hashlib
import os

import pytest
import torch
from tests.schedule.oracle import paper_swing
from tests.world.test_reductions import LARGE, SMALL, contribution, equal, totals

import phalanx
from phalanx.schedule import Collective, Schedule, Step, chain, gossip, lower, recursive_doubling, relabel, swing

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def grids(n):
    """Every way to write n as a product of factors of at least 2, in every order."""
    yield (n,)
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            for rest in grids(n // first):
                yield (first, *rest)


def algorithms(n):
    """Every all-reduce of n ranks that Phalanx knows."""
    yield phalanx.ring(n)
    yield from (phalanx.torus(*dims) for dims in grids(n))
    yield from (phalanx.hierarchical(n // k, k) for k in range(1, n + 1) if n % k == 0)
    yield phalanx.halving_doubling(n)
    yield phalanx.tree(n)
    yield phalanx.tree(n, pipeline=1)
    yield recursive_doubling(n)
    yield swing(n)
    yield from [paper_swing(n, together=True)] if n.bit_count() == 1 else []
    yield Schedule("two chunks too many", n, n + 2, (Step((Collective("all_reduce", tuple(range(n)), range(n + 2)),)),))
    yield relabel(phalanx.ring(n), list(reversed(range(n))))


def count_of(dtype):
    return SMALL // dtype.itemsize + 97  # too many for the short way, and no multiple of any world


def noise(rank, dtype):
    return torch.randn(count_of(dtype), generator=torch.Generator().manual_seed(rank)).to(dtype)


def fingerprint(x):
    """Of the bits, not of the values: 0.0 differs from -0.0, and a NaN equals itself."""
    return hashlib.sha256(x.view(BITS[x.dtype]).numpy().tobytes()).hexdigest()


def run_every_algorithm(comm):
    n, r = comm.size, comm.rank
    prints = {}
    for algorithm in algorithms(n):
        with phalanx.create_communicator(algorithm, timeout=20) as other:
            assert (other.rank, other.size) == (r, n)
            assert other.schedule == algorithm
            x = contribution(r, LARGE).float()
            assert other.all_reduce(x) is x
            equal(x, totals(n, LARGE)["sum"].float())
            x = contribution(r, LARGE).int()
            equal(other.all_reduce(x, "max"), totals(n, LARGE)["max"].int())
            for dtype in BITS:
                prints[algorithm.name, dtype] = fingerprint(other.all_reduce(noise(r, dtype)))
    equal(comm.all_reduce(torch.ones(2)), torch.full((2,), float(n)))  # is as well as ever
    return prints


def test_every_algorithm_is_exact_on_integers_and_leaves_the_same_bits_on_all_ranks(world):
    prints = world.run(run_every_algorithm)
    assert len(prints[0]) == 3 * len({algorithm.name for algorithm in algorithms(world.size)})
    for key, wanted in prints[0].items():
        assert [other[key] for other in prints] == [wanted] * world.size, key


def default_bits(comm):
    prints = []
    for dtype in BITS:
        for x in (noise(comm.rank, dtype), noise(comm.rank, dtype)[:1001]):
            prints.extend(fingerprint(comm.all_reduce(x.clone(), op)) for op in ("sum", "mean"))
            prints.append(fingerprint(comm.all_reduce_async(x.clone()).wait()))
    near = comm.all_reduce(noise(comm.rank, torch.float32))
    wanted = sum(noise(q, torch.float32).double() for q in range(comm.size))
    torch.testing.assert_close(near, wanted.float(), rtol=1e-5, atol=1e-5)
    return prints


def test_the_default_leaves_the_same_bits_on_all_ranks_for_small_and_large_messages(world):
    prints = world.run(default_bits)
    assert all(other == prints[0] for other in prints)


def naive(comm):
    """Each rank adds in its own order, beginning with itself: what an all-reduce must not do."""
    xs = comm.allgather(noise(comm.rank, torch.float32))
    total = xs[comm.rank].clone()
    for k in range(1, comm.size):
        total += xs[(comm.rank + k) % comm.size]
    return fingerprint(total)


def test_negative_control_a_sum_in_another_order_on_each_rank_has_other_bits(world):
    assert len(set(world.run(naive))) == (1 if world.size <= 2 else world.size)


def test_negative_control_one_bit_is_noticed():
    x = torch.zeros(100)
    y = x.clone()
    y[50] = -0.0
    assert torch.equal(x, y)
    assert fingerprint(x) != fingerprint(y)
    y[50] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0))
    assert fingerprint(x) != fingerprint(y)
    nan = torch.full((3,), float("nan"))
    assert fingerprint(nan) == fingerprint(nan.clone())


def odd_numbers(comm, size):
    """Zeros of both signs and NaNs of different payloads: numbers for which a and b in op(a, b) are not alike."""
    payload = torch.full((size,), 0x7FC00000 + comm.rank, dtype=torch.int32).view(torch.float32)
    zero = torch.full((size,), -0.0 if comm.rank % 2 else 0.0)
    mixed = torch.where(torch.arange(size) % comm.size == comm.rank, payload, zero)
    return [fingerprint(comm.all_reduce(x.clone(), op)) for x in (payload, zero, mixed) for op in ("sum", "max", "min")]


@pytest.mark.parametrize("size", [10, LARGE])
def test_signed_zeros_and_nans_too_have_the_same_bits_on_all_ranks(world, size):
    prints = world.run(odd_numbers, size)
    assert all(other == prints[0] for other in prints)


# ---- the Collective form ------------------------------------------------------------------------------------------------------


def run_as_collectives(comm):
    n, r = comm.size, comm.rank
    os.environ["PHALANX_FORM"] = "collectives"
    try:
        for algorithm in algorithms(n):
            if algorithm.lowered and n > 1:
                continue  # has no collectives
            with phalanx.create_communicator(algorithm, timeout=20) as other:
                for x in (contribution(r, LARGE).float(), contribution(r, LARGE + 1).int()):
                    equal(other.all_reduce(x.clone()), totals(n, len(x))["sum"].to(x.dtype))
                x = contribution(r, LARGE).float() * n
                equal(other.all_reduce(x, "mean"), totals(n, LARGE)["sum"].float())
                x = contribution(r, LARGE).float()
                equal(other.all_reduce(x, "max"), totals(n, LARGE)["max"].float())
                equal(other.reduce_scatter(torch.ones(3 * n)), torch.full((3,), float(n)))
                equal(other.bcast(torch.full((LARGE,), float(r)), n - 1), torch.full((LARGE,), float(n - 1)))
                half = other.split(r % 2)
                equal(half.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(half.size)))
    finally:
        del os.environ["PHALANX_FORM"]
    equal(comm.all_reduce(torch.ones(2)), torch.full((2,), float(n)))


def test_the_collective_form_gives_the_same_sums_on_gloo(world):
    world.run(run_as_collectives, deadline=60)


# ---- what is not an algorithm for this world ----------------------------------------------------------------------------------


def reject(comm, culprit):
    """Only `culprit` errs: nothing is sent, so nobody waits for it."""
    n = comm.size
    if comm.rank == culprit:
        for wrong in (phalanx.ring(n + 1), phalanx.torus(2, n), gossip(n, 0), Schedule("mean", n, 1, (), goal="mean")):
            with pytest.raises(phalanx.ScheduleError):
                phalanx.create_communicator(wrong)
        if n > 1:
            whole = lower(phalanx.ring(n))
            for broken in (whole.steps[:-1], whole.steps[1:], whole.steps + whole.steps[:1], ()):
                with pytest.raises(phalanx.ScheduleError, match="wanted"):
                    phalanx.create_communicator(Schedule("broken", n, whole.chunks, broken))
            with pytest.raises(ValueError, match="backend"):
                phalanx.create_communicator(backend="gloo")
        for wrong in ("ring", 3, lambda n: phalanx.ring(n), phalanx.ring):
            with pytest.raises(TypeError, match="Schedule"):
                phalanx.create_communicator(wrong)
        for wrong in (0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                phalanx.create_communicator(timeout=wrong)
    with phalanx.create_communicator(phalanx.ring(n), timeout=20) as other:
        equal(other.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(n)))


def test_a_schedule_for_another_world_or_another_purpose_raises_before_anything_is_sent(world):
    for culprit in {0, world.size - 1}:
        world.run(reject, culprit)


# ---- several communicators in one process -------------------------------------------------------------------------------------


def close_one_of_two(comm):
    n = comm.size
    first = phalanx.create_communicator(timeout=20)
    second = phalanx.create_communicator(phalanx.tree(n), timeout=20)
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.all_reduce(torch.ones(1))
    equal(second.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(n)))
    second.close()
    equal(comm.all_reduce(torch.ones(3)), torch.full((3,), float(n)))


def test_closing_one_communicator_leaves_the_others(world):
    world.run(close_one_of_two)


def two_at_once(comm):
    """Both in flight, begun in opposite orders on even and odd ranks: allowed, for each has its own thread and its own names."""
    n, r = comm.size, comm.rank
    with phalanx.create_communicator(timeout=20) as first, phalanx.create_communicator(timeout=20) as second:
        for size in (10, LARGE):
            x, y = torch.full((size,), 1.0), torch.full((size,), 100.0)
            order = [(first, x), (second, y)] if r % 2 else [(second, y), (first, x)]
            pending = []
            for other, z in order:
                pending.append(other.all_reduce_async(z))
                comm.barrier()  # the first of each rank is under way before the second is begun
            for p in pending:
                p.wait()
            equal(x, torch.full((size,), float(n)))
            equal(y, torch.full((size,), 100.0 * n))


def test_two_communicators_in_flight_at_once_do_not_mix_their_messages(world):
    world.run(two_at_once)


def runs_any_schedule(comm):
    n = comm.size
    for schedule in (phalanx.ring(n), phalanx.halving_doubling(n), recursive_doubling(n), phalanx.tree(n)):
        for count in (1, n + 1, 100_003):
            x = torch.arange(count, dtype=torch.float32) % 31 + comm.rank
            assert comm.run(schedule, x) is x
            assert torch.equal(x, (torch.arange(count, dtype=torch.float32) % 31) * n + n * (n - 1) / 2)
    with pytest.raises(phalanx.ScheduleError, match="ranks"):
        comm.run(phalanx.ring(n + 1), torch.ones(3))
    rounds = chain([gossip(n, k) for k in range(2)], goal="mixing")
    mixed = torch.full((5,), float(comm.rank))
    total = comm.allreduce_obj(comm.run(rounds, mixed)[0].item())
    assert total == pytest.approx(n * (n - 1) / 2)  # mixing moves values about and loses nothing


def test_a_communicator_runs_any_schedule(world):
    world.run(runs_any_schedule)
