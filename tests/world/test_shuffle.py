"""AsyncShuffle on real processes: the same claims as between threads, bounded memory, and a neighbour that dies."""

from __future__ import annotations

import gc
import signal

import pytest
import torch
from tests.data.test_shuffle import cases, check_visits, plan_of, train
from tests.long import often
from tests.world.programs.herd import Case, Herd, play

from phalanx.data import AsyncShuffle

SIZES = (2, 3, 4, 5)


@pytest.mark.parametrize(("size", "n", "options", "looks"), list(cases(12, SIZES)))
def test_processes_own_every_sample_once_and_train_it_once_an_epoch(pools, size, n, options, looks):
    check_visits(pools.of(size).run(train, n, options, 3, looks), plan_of(n, size, options))


def tensor_bytes() -> int:
    """Of all tensors that are alive, each memory counted once."""
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values())


def memory(comm, n, batch):
    x = torch.zeros(n, 1000, dtype=torch.uint8)
    y = torch.arange(n)
    before = tensor_bytes() - x.nbytes - y.nbytes
    shuffle = AsyncShuffle((x, y), comm, batch=batch)
    del x, y
    most = 0
    for _ in range(3):
        for a, b in shuffle:
            del a, b
            most = max(most, tensor_bytes() - before)
    shuffle.close()
    return most, shuffle.plan.capacity


def test_memory_is_the_share_and_four_batches(pools):
    row, batch = 1000 + 8, 20
    for most, capacity in pools.of(4).run(memory, 4 * 12 * batch, batch):  # a second share would be 12 batches
        assert capacity * row <= most <= capacity * row + 4 * batch * (row + 8) + 4096


def beside_all_reduces(comm, steps):
    """A training step as it is: the shuffle's messages and the all-reduces of gradients share the connections."""
    x, y = torch.arange(4000 * 50).view(4000, 50), torch.arange(4000)
    shuffle = AsyncShuffle((x, y), comm, batch=50, plan="random")
    batches = iter(shuffle)
    for _ in range(steps):
        a, b = next(batches)
        assert torch.equal(a, x[b])
        pending = [comm.all_reduce_async(torch.full((30_000,), float(comm.rank))) for _ in range(3)]
        for p in pending:
            assert (p.wait() == sum(range(comm.size))).all()
    shuffle.close()


@pytest.mark.parametrize("native", ["1", "0"])
def test_samples_travel_beside_gradients(pools, native):
    pools.of(3, PHALANX_NATIVE=native).run(beside_all_reduces, 15)


@pytest.fixture(scope="module")
def herd():
    made = Herd()
    yield made
    made.close()


@pytest.mark.parametrize("strike", [signal.SIGKILL, *often(signal.SIGSTOP)])
def test_a_neighbour_that_dies_or_stops_is_an_error_and_no_hang(herd, tmp_path, strike):
    timeout = 3.0
    outcome = play(herd, Case("shuffling", {"timeout": timeout}, strike=strike, victim=1), tmp_path)
    for rank in (0, 2):
        error = outcome.word(rank, "error")
        assert error["missing"] == [1], error
        assert error["at"] - outcome.struck < timeout + 5
        assert outcome.codes[rank] == 0, outcome.stderr
