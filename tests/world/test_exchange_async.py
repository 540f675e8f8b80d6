"""exchange_async: messages between neighbours that hold up nobody else, over gloo and between threads."""

import time

import pytest
import torch

import phalanx


def rings(comm, bytes_of):
    """Several exchanges under way at once, of sizes that differ from rank to rank, to the left and to the right."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    flying = []
    for tag, (dest, source) in enumerate([(left, right), (right, left), (left, right)]):
        x = torch.full((bytes_of + comm.rank,), 10 * comm.rank + tag, dtype=torch.uint8)
        out = torch.zeros(bytes_of + source, dtype=torch.uint8)
        flying.append((comm.exchange_async(x, dest, out, source, tag), out, source, tag))
    total = comm.all_reduce(torch.ones(3))  # called while they fly
    assert total.tolist() == [comm.size] * 3
    for pending, out, source, tag in reversed(flying):  # in any order
        assert pending.wait() is out
        assert pending.done()
        assert (out == 10 * source + tag).all()


def test_messages_reach_both_neighbours_and_differ_in_size(world):
    if world.size > 1:
        world.run(rings, 5)
        world.run(rings, 1 << 18)


def test_threads_exchange_as_processes_do():
    for size in (2, 3, 8):
        phalanx.run_local(size, lambda comm: rings(comm, 100))


def empty(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    out = torch.zeros(3 if right == 0 else 0)
    x = torch.full((3 if comm.rank == 0 else 0,), 7.0)
    comm.exchange_async(x, left, out, right).wait()
    assert out.tolist() == ([7.0] * 3 if right == 0 else [])


def test_an_empty_tensor_is_not_sent(world):
    if world.size > 1:
        world.run(empty)


def slow_neighbour(comm, late):
    """Rank 0 joins the exchange late; collectives that were called after it must not wait for that."""
    other = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, out = torch.full((1000,), float(comm.rank)), torch.zeros(1000)
    comm.barrier()
    begun = time.monotonic()
    pending = comm.exchange_async(x, other[0], out, other[1]) if comm.rank else None
    comm.all_reduce(torch.ones(50_000))
    reduced = time.monotonic() - begun
    if pending is None:
        time.sleep(late)
        pending = comm.exchange_async(x, other[0], out, other[1])
    early = pending.done()
    pending.wait()
    assert (out == other[1]).all()
    return reduced, early, time.monotonic() - begun


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_slow_neighbour_delays_the_exchange_and_nothing_else(pools, native):
    late = 1.0
    found = pools.of(3, PHALANX_NATIVE=native).run(slow_neighbour, late)
    for rank, (reduced, early, finished) in enumerate(found):
        assert reduced < late / 2, "an all-reduce waited for an exchange that was called before it"
        if rank:
            assert not early
        assert finished >= late * 0.9


def wrong(comm):
    x = torch.ones(4)
    other = (comm.rank + 1) % comm.size
    for peer in (comm.rank, -1, comm.size, None):
        with pytest.raises(ValueError, match="dest"):
            comm.exchange_async(x, peer, x.clone(), other)
        with pytest.raises(ValueError, match="source"):
            comm.exchange_async(x, other, x.clone(), peer)
    with pytest.raises(ValueError, match="contiguous"):
        comm.exchange_async(x, other, torch.ones(4, 4).t(), other)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        comm.exchange_async([1.0], other, x, other)
    comm.barrier()


def test_wrong_arguments_raise_before_anything_is_sent(pair):
    pair.run(wrong)
