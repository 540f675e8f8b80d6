"""NCCL of the simulated CUDA: what it computes, what blocks, what is caught. Each claim has a control with the mistake."""

import datetime

import pytest
import torch
import torch.distributed as dist
from tests.simulated_cuda import distributed as sim
from tests.simulated_cuda.conductor import DeadlockError
from tests.simulated_cuda.launch import die, hang, launch, run_ranks
from tests.simulated_cuda.nccl import CollectiveMismatchError
from tests.simulated_cuda.order import UnorderedAccessError
from tests.simulated_cuda.simulated import simulated
from tests.simulated_cuda.simulation import process


@pytest.mark.parametrize("seed", range(4))
def test_collectives_compute(seed):
    def run(rank):
        x = torch.arange(4.0, device="cuda") + rank
        parts, whole = torch.empty(2, device="cuda"), torch.empty(8, device="cuda")
        sim.reduce_scatter_tensor(parts, x.clone())
        sim.all_gather_into_tensor(whole, x)
        root = torch.full((1,), float(rank), device="cuda")
        sim.broadcast(root, 1)
        total = x.clone()
        sim.reduce(total, 0)
        sim.all_reduce(x, dist.ReduceOp.MAX)
        return parts.tolist(), whole.tolist(), root.tolist(), total.tolist() if rank == 0 else None, x.tolist()

    with simulated(seed=seed):
        first, second = run_ranks(2, run)
    whole = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    assert first == ([1.0, 3.0], whole, [1.0], [1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0])
    assert second == ([5.0, 7.0], whole, [1.0], None, [1.0, 2.0, 3.0, 4.0])


def unwaited(rank, *, waits):
    x = torch.ones(4, device="cuda")
    work = sim.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    assert process().syncs == []  # neither call has blocked the host
    return (x * 2).tolist()


def test_wait_orders_the_stream_and_does_not_block_the_host():
    with simulated():
        assert run_ranks(2, lambda rank: unwaited(rank, waits=True)) == [[4.0] * 4] * 2


def test_a_work_that_nobody_waits_for_is_caught():
    with pytest.raises(UnorderedAccessError, match="all_reduce"), simulated():
        run_ranks(2, lambda rank: unwaited(rank, waits=False))


def test_wait_with_a_timeout_blocks_the_host():
    def run(rank):
        if rank == 1:  # comes late
            conductor = process().simulation.conductor
            conductor.wait(lambda: False, 5.0, "a nap")
        begun = process().simulation.conductor.now
        x = torch.ones(4, device="cuda")
        sim.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=60))
        return [sync.what for sync in process().syncs], process().simulation.conductor.now - begun

    with simulated():
        (syncs, waited), _ = run_ranks(2, run)
    assert syncs == ["Work.wait(timeout)"]
    assert waited > 4


def test_messages_meet_in_the_order_of_their_pair():
    def run(rank):
        a, b = torch.full((2,), float(rank), device="cuda"), torch.empty(2, device="cuda")
        for work in sim.batch_isend_irecv([sim.P2POp(sim.isend, a, 1 - rank), sim.P2POp(sim.irecv, b, 1 - rank)]):
            work.wait()
        return b.tolist()

    for seed in range(4):
        with simulated(seed=seed):
            assert run_ranks(2, run) == [[1.0, 1.0], [0.0, 0.0]]


def crossed(rank, *, order):
    groups = [sim.new_group([0, 1]), sim.new_group([0, 1])]
    x = [torch.ones(1, device="cuda") for _ in groups]
    works = [sim.all_reduce(x[i], group=groups[i], async_op=True) for i in order(rank)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return True


@pytest.mark.parametrize("seed", range(6))
def test_groups_in_one_order_do_not_deadlock(seed):
    with simulated(seed=seed):
        assert all(run_ranks(2, lambda rank: crossed(rank, order=lambda rank: (0, 1))))


@pytest.mark.parametrize("seed", range(3))
def test_groups_in_different_orders_deadlock_and_the_cycle_is_printed(seed):
    cycle = r"(?s)holds; that one waits for ranks \[[01]\].*test_nccl"
    with pytest.raises(DeadlockError, match=cycle), simulated(seed=seed):
        run_ranks(2, lambda rank: crossed(rank, order=lambda rank: (0, 1) if rank == 0 else (1, 0)))


def test_groups_in_different_orders_may_run_where_a_gpu_has_room_for_both():
    with simulated(one_nccl_kernel=False):
        assert all(run_ranks(2, lambda rank: crossed(rank, order=lambda rank: (0, 1) if rank == 0 else (1, 0))))


def test_a_collective_that_one_rank_does_not_call_is_a_deadlock():
    def run(rank):
        x = torch.ones(4, device="cuda")
        if rank == 0:
            sim.all_reduce(x)
        return x.tolist()

    with pytest.raises(DeadlockError, match=r"(?s)all_reduce #1 .*waits for ranks \[1\]"), simulated():
        run_ranks(2, run)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rank: sim.all_reduce(torch.ones(4 + rank, device="cuda")), "4 torch.float32.*5 torch.float32"),
        (
            lambda rank: sim.all_reduce(torch.ones(4, device="cuda", dtype=(torch.float32, torch.float16)[rank])),
            "float32.*float16",
        ),
        (
            lambda rank: (sim.all_reduce if rank else lambda x: sim.broadcast(x, 0))(torch.ones(4, device="cuda")),
            "broadcast.*all_reduce",
        ),
        (lambda rank: sim.new_group([0] if rank else [0, 1]), r"new_group number 1"),
        (lambda rank: sim.all_reduce(torch.ones(4, device="cuda:0")), "Duplicate GPU"),
    ],
)
def test_members_that_differ_are_named(call, words):
    with pytest.raises(CollectiveMismatchError, match=words), simulated():
        run_ranks(2, call)


def test_a_killed_rank_leaves_its_peers_waiting():
    def run(rank):
        if rank == 1:
            die()
        x = torch.ones(4, device="cuda")
        sim.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=30))

    with pytest.raises(dist.DistBackendError, match="timed out"), simulated():
        run_ranks(2, run)


def test_a_hang_is_released_by_an_abort():
    def run(rank):
        if rank == 1:
            hang("all_reduce")
        x = torch.ones(4, device="cuda")
        work = sim.all_reduce(x, async_op=True)
        event = torch.cuda.current_stream().record_event()
        assert not work.is_completed()
        sim.Distributed().abort()
        event.synchronize()
        torch.cuda.synchronize()
        return work.is_success()

    with simulated():
        assert run_ranks(2, run) == [False, False]


def test_calls_are_recorded_in_order():
    with simulated() as made:
        run_ranks(2, lambda rank: crossed(rank, order=lambda rank: (0, 1)))
        calls = made.own["world"].calls
        assert calls[0] == calls[1]
        assert calls[0][:2] == ["new_group [0, 1]"] * 2


def test_the_products_communicator_runs_on_several_hosts():
    def run(comm):
        x = torch.full((3,), float(comm.rank), device="cuda")
        comm.all_reduce(x)
        return x.tolist(), comm.inter_size, comm.intra_size, torch.cuda.current_device()

    with simulated(hosts=2, gpus_per_host=2):
        assert launch(4, run) == [([6.0] * 3, 2, 2, rank % 2) for rank in range(4)]
