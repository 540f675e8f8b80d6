"""Every collective of the backend gives what gloo gives, for dtypes that the core knows and others, and all layouts."""

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.backend.groups import both, group_of
from tests.long import often

import phalanx
from phalanx import _native
from phalanx.backend import Options, engine

SUM, AVG, MAX, MIN, PRODUCT = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8)
SHAPES = ((), (0,), (3, 5), (20_000,))


def numbers(shape, dtype, rank, *, odd_strides=False):
    """Small integers that differ by rank and place: exact in every dtype, as sums and products."""
    count = torch.Size(shape).numel()
    x = ((torch.arange(count) * 7 + 3 * rank) % 5 + 1).to(dtype).reshape(shape)
    return torch.stack([x, x], dim=-1)[..., 0] if odd_strides else x


def same_reductions(comm, per_host, odd_strides=True):
    rank = comm.rank
    with both(per_host=per_host) as (ours, theirs):
        for dtype, shape, op in itertools.product(DTYPES, SHAPES, (SUM, MAX, MIN, PRODUCT)):
            mine = numbers(shape, dtype, rank, odd_strides=op is not PRODUCT and odd_strides)  # gloo takes none
            other = numbers(shape, dtype, rank)
            dist.all_reduce(mine, op, group=ours)
            dist.all_reduce(other, op, group=theirs)
            assert torch.equal(mine, other), (dtype, shape, op, mine, other)
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            mine, other = numbers((9,), torch.int32, rank), numbers((9,), torch.int32, rank)
            dist.all_reduce(mine, op, group=ours)
            dist.all_reduce(other, op, group=theirs)
            assert torch.equal(mine, other)
        mine, other = numbers((9,), torch.float32, rank), numbers((9,), torch.float32, rank)
        dist.all_reduce(mine, AVG, group=ours)
        dist.all_reduce(other, group=theirs)
        torch.testing.assert_close(mine, other / comm.size)  # the core multiplies by 1/size
        whole_numbers = torch.tensor([1 + rank, -1 - rank, 7])
        dist.all_reduce(whole_numbers, AVG, group=ours)
        total = sum(range(1, comm.size + 1))
        assert whole_numbers.tolist() == [int(total / comm.size), int(-total / comm.size), 7], "towards zero, as NCCL does it"
        part = torch.zeros(9)
        dist.reduce_scatter_tensor(part, numbers((9 * comm.size,), torch.float32, rank), AVG, group=ours)
        whole = numbers((9 * comm.size,), torch.float32, rank)
        dist.all_reduce(whole, group=theirs)
        torch.testing.assert_close(part, whole[9 * rank :][:9] / comm.size)
        complex_ones = torch.ones(3, dtype=torch.complex64)
        dist.all_reduce(complex_ones, group=ours)
        assert complex_ones.tolist() == [comm.size] * 3
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (comm.size,), check_invariants=True)
        dist.all_reduce(sparse, group=ours)
        assert sparse.to_dense().tolist() == [1.0] * comm.size


def late(comm):
    """Asynchronous all-reduces around the size up to which the calling thread begins them, where one rank comes late or not."""
    piece, limit = _native.whole_bytes(comm.size) // 4, engine.SHORT // 4
    with group_of("phalanx") as group:
        for number, count in enumerate((1, 5000, piece, piece + 1, limit, limit + 1)):
            for slow in (None, number % comm.size):
                xs = [torch.full((count,), float(comm.rank + k)) for k in range(3)]
                if comm.rank == slow:
                    time.sleep(0.01)  # longer than the others wait in their call
                works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
                last = torch.ones(count)
                dist.all_reduce(last, group=group)  # after all of them
                for k, (work, x) in enumerate(zip(works, xs)):
                    work.wait()
                    wanted = sum(r + k for r in range(comm.size))
                    assert x.min() == x.max() == wanted, (count, slow, k)
                assert last.min() == last.max() == comm.size


def test_ranks_that_come_late(pool):
    pool.run(late)


def never_comes(comm):
    """A call that should return at once does so even if the others call it much later."""
    with group_of("phalanx") as group:
        x, y = torch.ones(100), torch.ones(3)
        if comm.rank == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            assert not work.is_completed()
            comm.send(y, 1)  # the others call it only after this
        elif comm.rank == 1:
            comm.recv(0)
        comm.barrier()
        if comm.rank != 0:
            work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        return x[0].item()


def test_an_asynchronous_call_does_not_wait_for_the_other_ranks(pair):
    assert pair.run(never_comes) == [2.0, 2.0]


def test_reductions_are_those_of_gloo(pool):
    pool.run(same_reductions, 0)


@pytest.mark.parametrize("per_host", [2, *often(1)])
def test_reductions_between_hosts_are_those_of_gloo(four, per_host):
    four.run(same_reductions, per_host)


def without_shared_memory(comm):
    import os

    os.environ["PHALANX_NATIVE"] = "0"
    try:
        same_reductions(comm, 0, odd_strides=False)
    finally:
        del os.environ["PHALANX_NATIVE"]


def test_without_shared_memory_all_is_gloos(pair):
    pair.run(without_shared_memory)


def same_copies(comm):
    rank, size = comm.rank, comm.size
    with both() as (ours, theirs):
        for dtype, shape in itertools.product((*DTYPES, torch.bool, torch.int16, torch.complex64), SHAPES):
            for root in range(size):
                x = numbers(shape, dtype, rank, odd_strides=root == 1)
                dist.broadcast(x, root, group=ours)
                assert torch.equal(x, numbers(shape, dtype, root))
            outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, numbers(shape, dtype, rank, odd_strides=True), group=ours)
            assert all(torch.equal(out, numbers(shape, dtype, r)) for r, out in enumerate(outs))
            if shape:
                whole = torch.zeros(size * shape[0], *shape[1:], dtype=dtype)
                dist.all_gather_into_tensor(whole, numbers(shape, dtype, rank), group=ours)
                assert torch.equal(whole, torch.cat([numbers(shape, dtype, r) for r in range(size)]))
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group=ours)
        assert objects == [{"rank": r} for r in range(size)]
        several = [torch.zeros(size * n) for n in (1, 3)]
        with dist.distributed_c10d._coalescing_manager(group=ours):
            for n, out in zip((1, 3), several):
                dist.all_gather_into_tensor(out, torch.full((n,), float(rank)), group=ours)
        assert several[1].tolist() == [float(r) for r in range(size) for _ in range(3)]
        uneven = [torch.zeros(1) for r in range(size)]
        dist.gather(torch.ones(1) * rank, uneven if rank == 0 else None, dst=0, group=ours)
        assert rank or [x.item() for x in uneven] == list(range(size))
        part = torch.zeros(2)
        dist.scatter(part, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None, src=0, group=ours)
        assert part.tolist() == [rank, rank]
        assert theirs.size() == size


def test_copies_are_exact(pool):
    pool.run(same_copies)


def same_parts(comm):
    rank, size = comm.rank, comm.size
    with both() as (ours, theirs):
        for dtype, n, op in itertools.product(DTYPES, (0, 1, 5, 20_000), (SUM, MAX, AVG)):
            if op == AVG and dtype is torch.bool:
                continue
            whole = numbers((size * n,), dtype, rank)
            before, out = whole.clone(), torch.zeros(n, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole, op, group=ours)
            expected = before.clone()
            dist.all_reduce(expected, SUM if op == AVG else op, group=theirs)
            expected = expected[rank * n : (rank + 1) * n]
            torch.testing.assert_close(out, (expected.double() / size).to(dtype) if op == AVG else expected)
            assert torch.equal(whole, before)  # the input is left as it was
            if op != AVG:
                listed = torch.zeros(n, dtype=dtype)
                dist.reduce_scatter(listed, list(before.split(n) if n else [before] * size), op, group=ours)
                assert torch.equal(listed, out)
        whole = numbers((size * 4,), torch.float32, rank)  # in place, as FSDP does it
        expected = whole.clone()
        dist.all_reduce(expected, group=theirs)
        mine = whole[rank * 4 : (rank + 1) * 4]
        dist.reduce_scatter_tensor(mine, whole, group=ours)
        assert torch.equal(mine, expected[rank * 4 : (rank + 1) * 4])
        sent = torch.arange(size) + 10 * rank
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=ours)
        assert got.tolist() == [rank + 10 * r for r in range(size)]


def test_parts_are_those_of_gloo(pool):
    pool.run(same_parts)


def overlapping(comm):
    rank, size = comm.rank, comm.size
    threads = threading.active_count()
    with group_of("phalanx") as ours:
        xs = [torch.full((n,), float(rank + 1)) for n in (3, 100_000, 5)]
        works = [dist.all_reduce(x, async_op=True, group=ours) for x in xs]
        small = torch.ones(1)
        dist.all_reduce(small, group=ours)  # behind the queue, although it could run at once
        assert works[0].is_completed()
        assert small.item() == size
        for work, x in zip(works, xs):
            assert work.get_future().then(lambda f: f.value()[0].sum().item()).wait() == x.numel() * size * (size + 1) / 2
            assert work.wait()
            assert (work.is_success(), work.exception()) == (True, None)
            assert work.result()[0] is not None
        dist.barrier(group=ours)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size, ours),
                dist.P2POp(dist.irecv, got := torch.zeros(2), (rank - 1) % size, ours),
            ]
        )
        for request in requests:
            request.wait()
        assert got.tolist() == [(rank - 1) % size] * 2
        if rank == 0:
            found = {dist.recv(torch.zeros(1), group=ours) for _ in range(size - 1)}
            assert found == set(range(1, size))
        else:
            dist.send(torch.zeros(1), 0, group=ours)
        dist.barrier(group=ours)  # gloo's monitored barrier uses tag 0, too
        ours.monitored_barrier()
        with torch.inference_mode():
            inferred = torch.ones(4)
            dist.all_reduce(inferred, async_op=True, group=ours).wait()
            dist.broadcast(inferred, 0, group=ours)
        assert inferred[0] == size
        assert ours.name() == "phalanx"
    assert threading.active_count() == threads


def test_asynchronous_calls_keep_their_order_and_leave_no_thread(pool):
    pool.run(overlapping)


def disagreeing(comm):
    with group_of("phalanx") as ours:
        try:
            dist.all_reduce(torch.ones(2 + comm.rank), group=ours)
        except phalanx.CommunicationError as error:
            return str(error), error.operation, dist.all_reduce(torch.ones(1), group=ours)
    return None


def test_ranks_that_disagree_are_named_and_the_group_works_on(pair):
    for words, operation, _ in pair.run(disagreeing):
        assert "rank 0: all_reduce(float32[2], sum); rank 1: all_reduce(float32[3], sum)" in words
        assert operation.startswith("all_reduce(float32[")


def one_stays_away(comm):
    with group_of("phalanx", per_host=1, seconds=4) as ours:
        dist.all_reduce(torch.ones(3), group=ours)
        comm.barrier()
        try:
            if comm.rank != 3:
                dist.all_reduce(torch.ones(100_000), group=ours)
        except phalanx.CommunicationError as error:
            return error.operation, error.missing
        finally:
            comm.barrier()
    return None


def test_a_rank_that_stays_away_on_another_host_is_named(four):
    *others, away = four.run(one_stays_away)
    assert others == [("all_reduce(float32[100000], sum)", (3,))] * 3
    assert away is None


def with_algorithm(comm, how):
    import os

    if how == "environment":
        os.environ["PHALANX_ALGORITHM"] = f"ring:{comm.size}"
    options = {"pg_options": Options(algorithm=phalanx.ring(comm.size))} if how == "options" else {}
    try:
        with group_of("phalanx", **options) as ours:
            x = torch.full((100_000,), comm.rank + 1.0)
            dist.all_reduce(x, group=ours)
            return x.unique().tolist(), ours.algorithm.name
    finally:
        os.environ.pop("PHALANX_ALGORITHM", None)


@pytest.mark.parametrize("how", ["environment", "options"])
def test_the_algorithm_can_be_named(pair, how):
    assert pair.run(with_algorithm, how) == [([3.0], "ring(2)")] * 2


def wrong_options(comm, options):
    try:
        dist.new_group(backend="phalanx", pg_options=options)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [("ring:2", "phalanx.backend.Options"), (Options(algorithm=phalanx.ring(5)), "is for 5 ranks, but this group has 2")],
    ids=["text", "size"],
)
def test_wrong_options_are_refused(pair, options, words):
    assert all(words in said for said in pair.run(wrong_options, options))
