"""Ranks of one host: the same promises with shared memory and without it."""

import pytest
import torch
from tests.world.test_reductions import LARGE, equal

import phalanx


@pytest.fixture(params=["shared memory", "sockets"])
def host(request, pools):
    """Three ranks, with the native core and without."""
    return pools.of(3, **({} if request.param == "shared memory" else {"PHALANX_NATIVE": "0"}))


def native():
    from phalanx.native import core

    return not core.UNAVAILABLE


def sums(comm):
    n, r = comm.size, comm.rank
    for count in (1, 5, 4096, LARGE + 3, 700_001):
        x = torch.arange(count, dtype=torch.float32) % 97 + r
        equal(comm.all_reduce(x), (torch.arange(count, dtype=torch.float32) % 97) * n + n * (n - 1) / 2)
        y = comm.buffer(count, torch.int64)
        y.fill_(r)
        equal(comm.all_reduce(y, "max"), torch.full((count,), n - 1))
    return comm.schedule.name


def test_sums_and_buffers(host):
    assert set(host.run(sums)) == {"ring(3)"}


def mixed_order(comm):
    """Synchronous calls run in the calling thread where memory is shared, asynchronous ones in the issuing thread."""
    n = comm.size
    pending = [comm.all_reduce_async(torch.full((50_000,), float(i))) for i in range(4)]
    between = comm.all_reduce(torch.ones(3))
    parts = comm.reduce_scatter(torch.ones(2 * n))
    equal(between, torch.full((3,), float(n)))
    equal(parts, torch.full((2,), float(n)))
    for i in (3, 0, 2, 1):
        equal(pending[i].wait(), torch.full((50_000,), float(i * n)))
    comm.barrier()
    child = comm.split(0, key=-comm.rank)
    equal(child.all_reduce(torch.ones(7)), torch.full((7,), float(n)))
    child.close()
    equal(comm.all_reduce(torch.ones(7)), torch.full((7,), float(n)))


def test_calls_keep_their_order_whichever_thread_runs_them(host):
    host.run(mixed_order)


def bits(comm):
    torch.manual_seed(comm.rank)
    made = [torch.randn(LARGE + 1).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    return [bytes(comm.all_reduce(x, "mean").contiguous().view(torch.uint8).numpy()) for x in made]


def test_ranks_end_bitwise_equal(host):
    first, *others = host.run(bits)
    assert all(other == first for other in others)


def disagree(comm, odd):
    with pytest.raises(phalanx.CommunicationError) as caught:
        comm.all_reduce(torch.ones(6 if comm.rank == odd else 5))
    equal(comm.all_reduce(torch.ones(4)), torch.full((4,), float(comm.size)))  # nothing is broken
    return caught.value.operation, caught.value.missing


@pytest.mark.skipif(not native(), reason="no native core: a disagreement is found by the timeout, or under PHALANX_DEBUG=1")
@pytest.mark.parametrize("odd", [0, 2])
def test_shared_memory_finds_disagreements_at_once(pools, odd):
    answers = pools.of(3).run(disagree, odd)
    assert [missing for _, missing in answers] == [(odd,)] * 3
    assert answers[odd][0] == "all_reduce(float32[6], sum)"
