"""What a communicator takes it gives back: files, threads, memory and keys of the store, closed or just dropped."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.long import often, times
from tests.world.pool import Pool

import phalanx

CYCLES, SPLITS = times(30, seldom=15), times(50, seldom=20)


def belongings(store):
    """Open files and threads of this rank, segments of all, keys of the store."""
    gc.collect()
    segments = [name for name in os.listdir("/dev/shm") if name.startswith(f"phalanx-{os.getpid()}-")]
    mapped = sum("phalanx" in line for line in open("/proc/self/maps"))  # noqa: SIM115  read at once
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "segments": len(segments),
        "maps": mapped,
        "keys": store.num_keys(),
    }


def settled(store, wanted):
    """What is more than `wanted`; after a moment, because the store hears of a closed connection later."""
    until = time.monotonic() + 5
    while more := {name: (wanted[name], now) for name, now in belongings(store).items() if now > wanted[name]}:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return more


def work(comm):
    n = comm.size
    assert comm.all_reduce(torch.ones(3)).tolist() == [n] * 3
    assert comm.reduce_scatter(torch.ones(n * 50_000)).sum().item() == n * 50_000
    assert comm.allgather_obj(comm.rank) == list(range(n))
    x = comm.buffer(10_000)
    x.fill_(1)
    assert comm.all_reduce_async(x).wait().sum().item() == n * 10_000


def create_and_close(comm, from_nothing):
    store = phalanx_store()
    if from_nothing:
        comm.close()  # and with it torch's process group: every cycle meets anew
    for cycle in range(CYCLES):
        with phalanx.create_communicator(timeout=20) as made:
            work(made)
            if cycle % 2:
                work(made.split(0))
            made.barrier()
        if cycle == 2:
            early = belongings(store)
    early["keys"] += 20 * comm.size  # those of the last one or two are removed with the next
    return settled(store, early)


def phalanx_store():
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


@pytest.mark.parametrize(
    ("env", "from_nothing"),
    [({}, True), *often(({"PHALANX_NATIVE": "0"}, False), ({"PHALANX_FORM": "collectives"}, False))],
    ids=["shared", *often("gloo", "calls")],
)
def test_closing_gives_everything_back(env, from_nothing):
    pool = Pool(3, env=env)
    try:
        assert pool.run(create_and_close, from_nothing, deadline=100) == [{}] * 3
    finally:
        pool.kill()


def drop_splits(comm):
    store = phalanx_store()
    for count in range(SPLITS):
        work(comm.split(0, key=-comm.rank))
        half = comm.split(comm.rank % 2)
        half.barrier()
        del half
        if count == 2:
            comm.barrier()
            early = belongings(store)
            comm.barrier()
    comm.barrier()
    more = settled(store, early)
    comm.barrier()
    return more


@pytest.mark.parametrize("env", [{}, {"PHALANX_NATIVE": "0"}], ids=["shared", "gloo"])
def test_a_split_that_is_dropped_gives_everything_back(pools, env):
    assert pools.of(3, **env).run(drop_splits, deadline=100) == [{}] * 3


def drop_one_side(comm):
    """Rank 0 drops its end of a split; the others are still at work with what they have."""
    child = comm.split(0)
    x = child.buffer(1000)
    x.fill_(comm.rank)
    child.all_reduce(x)
    if comm.rank == 0:
        del child
        gc.collect()
    comm.barrier()
    assert x.tolist() == [sum(range(comm.size))] * 1000
    x.fill_(7)  # memory that was handed out stays
    comm.barrier()
    assert comm.allgather_obj(x[0].item()) == [7.0] * comm.size


def test_a_dropped_split_does_no_harm_to_the_others(pools):
    pools.of(3).run(drop_one_side)


def test_threads_of_run_local_end():
    before = threading.active_count()
    for _ in range(5):
        phalanx.run_local(3, work)
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before
