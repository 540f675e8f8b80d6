"""all_reduce, reduce_scatter and barrier, on every world size: closed forms that hold for any number of ranks."""

import itertools
import math
import time

import pytest
import torch

from phalanx.comm.choose import LAB

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SMALL = LAB.small_on_one_host
LARGE = SMALL // 4 + 101  # float32s: more than what takes the way with the fewest steps


def contribution(rank, count):
    """Small integers, so that every dtype has room for their sum and every order of adding gives the same."""
    return torch.arange(count) % 3 + rank % 4


def totals(size, count):
    """What the contributions of `size` ranks reduce to, by op."""
    i, highest = torch.arange(count) % 3, min(size, 4) - 1
    return {"sum": i * size + sum(rank % 4 for rank in range(size)), "max": i + highest, "min": i}


def equal(x, wanted):
    """The same shape, dtype and values; the error shows where not."""
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)


# ---- dtypes and ops ---------------------------------------------------------------------------------------------------------


def reduce_all_dtypes(comm, nbytes):
    for dtype, op in itertools.product(INTEGERS + FLOATS, ("sum", "max", "min")):
        count = nbytes // dtype.itemsize
        wanted = totals(comm.size, count)
        x = contribution(comm.rank, count).to(dtype)
        assert comm.all_reduce(x, op) is x
        equal(x, wanted[op].to(dtype))
    for dtype in COMPLEX:
        count = nbytes // dtype.itemsize
        wanted = totals(comm.size, count)
        x = contribution(comm.rank, count).to(dtype) * (1 + 2j)
        equal(comm.all_reduce(x), wanted["sum"].to(dtype) * (1 + 2j))
    for dtype in FLOATS + COMPLEX:
        count = nbytes // dtype.itemsize
        wanted = totals(comm.size, count)
        x = (contribution(comm.rank, count) * comm.size).to(dtype)
        mean = comm.all_reduce(x, "mean")
        if dtype.is_complex:  # torch divides complex numbers by way of |z|^2, which rounds
            torch.testing.assert_close(mean, wanted["sum"].to(dtype))
        else:
            equal(mean, wanted["sum"].to(dtype))


@pytest.mark.parametrize("nbytes", [112, SMALL + 272])
def test_sum_max_min_and_mean_of_every_dtype(world, nbytes):
    world.run(reduce_all_dtypes, nbytes)


def reduce_truths(comm):
    for count in (comm.size + 1, SMALL + comm.size + 1):
        mine = torch.arange(count) % (comm.size + 1) == comm.rank
        someone = torch.arange(count) % (comm.size + 1) < comm.size
        equal(comm.all_reduce(mine.clone()), someone)
        equal(comm.all_reduce(mine.clone(), "max"), someone)
        equal(comm.all_reduce(mine.clone(), "min"), mine if comm.size == 1 else torch.zeros(count, dtype=torch.bool))
        equal(comm.all_reduce(~mine, "min"), ~someone)


def test_the_sum_of_truths_is_their_or(world):
    world.run(reduce_truths)


def overflow_float16(comm):
    part = 2.0 ** math.floor(math.log2(60_000 / comm.size))
    x = torch.full((5,), part * comm.size, dtype=torch.float16)  # half of the largest number or more, exact when divided
    equal(comm.all_reduce(x.clone(), "mean"), x)
    assert bool(comm.all_reduce(x).isinf().all()) == (comm.size > 1)


def test_a_mean_in_float16_divides_before_the_wire(world):
    world.run(overflow_float16)


def reduce_nan(comm):
    x = torch.zeros(4)
    x[comm.rank % 4] = float("nan")
    hit = torch.arange(4) < comm.size
    for op in ("sum", "mean", "max", "min"):
        assert torch.equal(comm.all_reduce(x.clone(), op).isnan(), hit)


def test_a_nan_is_never_swallowed(world):
    world.run(reduce_nan)


# ---- shapes and layouts -----------------------------------------------------------------------------------------------------


def reduce_counts(comm):
    n = comm.size
    near = [c for m in (n, SMALL // 4) for c in (m - 1, m, m + 1)]
    for count in sorted({0, 1, 2, 2 * n + 1, 7, 97, 10_007, SMALL // 4 + n, 40_009, *near}):
        x = contribution(comm.rank, count).float()
        equal(comm.all_reduce(x), totals(n, count)["sum"].float())


def test_counts_around_the_edges_of_chunks_and_of_small_messages(world):
    world.run(reduce_counts)


def reduce_layouts(comm):
    n, total = comm.size, sum(range(comm.size))
    for rows in (3, 600):  # below and above a small message
        base = torch.arange(rows * 4 * 5 * 6, dtype=torch.float32)

        def layouts(of, rows=rows):
            block = of.clone().view(rows, 4, 5, 6)
            return {
                "transposed": block.transpose(0, 3),
                "strided": of.clone()[1::2],
                "narrow": block.clone()[:, 1:3, :, 2:5],
                "channels_last": block.clone().contiguous(memory_format=torch.channels_last),
                "column": of.clone().view(-1, 4)[:, 2],
            }

        for name, x in layouts(base + comm.rank).items():
            strides = x.stride()
            assert comm.all_reduce(x) is x
            assert x.stride() == strides
            equal(x, layouts(base * n + total)[name])
    scalar = torch.tensor(float(comm.rank))
    assert comm.all_reduce(scalar) is scalar
    assert scalar.shape == ()
    assert scalar.item() == total
    for shape in ((0,), (3, 0, 2)):
        assert comm.all_reduce(torch.empty(shape)).shape == shape


def test_any_layout_is_reduced_in_place(world):
    world.run(reduce_layouts)


def reduce_a_view(comm):
    whole = torch.full((7, 9), -1.0)
    comm.all_reduce(whole[2:5, 3:7].fill_(1.0))
    wanted = torch.full((7, 9), -1.0)
    wanted[2:5, 3:7] = comm.size
    equal(whole, wanted)


def test_a_view_leaves_its_neighbours_alone(world):
    world.run(reduce_a_view)


def reduce_expanded(comm):
    for x in (torch.ones(1).expand(5), torch.ones(3, 1).expand(3, LARGE)):
        with pytest.raises(ValueError, match=r"clone\(\)|contiguous\(\)"):
            comm.all_reduce(x)
    equal(comm.all_reduce(torch.ones(2)), torch.full((2,), float(comm.size)))


def test_an_expanded_tensor_cannot_be_reduced_in_place(world):
    world.run(reduce_expanded)


# ---- autograd ---------------------------------------------------------------------------------------------------------------


def reduce_leaves(comm):
    for count in (3, LARGE):
        leaf = torch.nn.Parameter(torch.full((count,), 1.0))
        assert comm.all_reduce(leaf) is leaf
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert leaf.grad_fn is None
        equal(leaf.detach(), torch.full((count,), float(comm.size)))
        (leaf * 2).sum().backward()
        comm.all_reduce(leaf.grad, "mean")
        equal(leaf.grad, torch.full((count,), 2.0))


def test_a_leaf_that_requires_grad_is_reduced_as_data(world):
    world.run(reduce_leaves)


def reduce_under(comm, mode):
    with mode():
        x = torch.full((LARGE,), float(comm.rank))
        equal(comm.all_reduce(x), torch.full((LARGE,), float(sum(range(comm.size)))))
        equal(comm.all_reduce(torch.ones(3), "mean"), torch.ones(3))
        equal(comm.bcast(torch.ones(3) if comm.rank == 0 else torch.zeros(3)), torch.ones(3))
        equal(comm.reduce_scatter(torch.ones(comm.size, 2)), torch.full((1, 2), float(comm.size)))
        assert comm.allreduce_obj(1) == comm.size
    equal(comm.all_reduce(torch.ones(3)), torch.full((3,), float(comm.size)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reductions_work_where_a_model_is_evaluated(world, mode):
    world.run(reduce_under, mode)


# ---- several at once --------------------------------------------------------------------------------------------------------


def many_pending(comm, order):
    n, count = comm.size, 12
    xs = [torch.full((97 if k % 2 else LARGE + k,), float(comm.rank + k)) for k in range(count)]
    pending = [comm.all_reduce_async(x, "max" if k % 3 == 0 else "sum") for k, x in enumerate(xs)]
    for k in {"forwards": range(count), "backwards": reversed(range(count)), "mixed": [5, 0, 11, 3, 8, 1, 10, 2, 9, 4, 7, 6]}[
        order
    ]:
        assert pending[k].wait() is xs[k]
        assert pending[k].done()
        assert pending[k].wait() is xs[k]  # again: no harm
        wanted = n - 1 + k if k % 3 == 0 else sum(range(n)) + n * k
        equal(xs[k], torch.full_like(xs[k], float(wanted)))


@pytest.mark.parametrize("order", ["forwards", "backwards", "mixed"])
def test_several_pending_can_be_waited_for_in_any_order(world, order):
    world.run(many_pending, order)


def done_by_itself(comm):
    x = torch.ones(10)
    pending = comm.all_reduce_async(x)
    end = time.monotonic() + 10
    while not pending.done() and time.monotonic() < end:
        time.sleep(0.001)
    assert pending.done()
    equal(x, torch.full((10,), float(comm.size)))


def test_an_all_reduce_gets_done_without_a_wait(world):
    world.run(done_by_itself)


def late_rank(comm):
    x = torch.ones(4)
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    pending = comm.all_reduce_async(x)
    early = pending.done()
    pending.wait()
    return early


def test_done_is_false_while_a_rank_is_late(world):
    assert world.size == 1 or not any(world.run(late_rank)[:-1])


def mixed_with_blocking(comm):
    """One order for everything: what is asked for later starts later, also when it is waited for first."""
    n = comm.size
    a, b = torch.full((LARGE,), 1.0), torch.full((5,), 2.0)
    first, second = comm.all_reduce_async(a), comm.all_reduce_async(b)
    assert comm.allgather_obj(comm.rank) == list(range(n))
    comm.barrier()
    assert first.done()
    assert second.done()
    equal(comm.all_reduce(torch.ones(1)), torch.tensor([float(n)]))
    equal(first.wait(), torch.full((LARGE,), float(n)))
    equal(second.wait(), torch.full((5,), 2.0 * n))


def test_pending_and_blocking_calls_mix(world):
    world.run(mixed_with_blocking)


def repeated(comm):
    x = torch.ones(300)
    for k in range(1, 30):
        comm.all_reduce(x, "mean" if k % 2 else "max")
    equal(x, torch.ones(300))


def test_repeated_calls(world):
    world.run(repeated)


# ---- reduce_scatter ---------------------------------------------------------------------------------------------------------


def scatter_reduced(comm):
    n, r = comm.size, comm.rank
    for rows, op, dtype in itertools.product((1, 3, 1000), ("sum", "mean", "max", "min"), (torch.float32, torch.float16)):
        x = (torch.arange(n * rows * 5) % 7 + r % 4).view(n * rows, 5) * n
        x, before = x.to(dtype), x.to(dtype)
        total = torch.stack([(torch.arange(n * rows * 5) % 7 + q % 4).view(n * rows, 5) * n for q in range(n)])
        wanted = {"sum": total.sum(0), "mean": total.sum(0) // n, "max": total.amax(0), "min": total.amin(0)}[op].to(dtype)
        part = comm.reduce_scatter(x, op)
        equal(part, wanted[r * rows : (r + 1) * rows])
        equal(x, before)
    turned = (torch.arange(2 * n) + r).view(2, n).t()
    equal(comm.reduce_scatter(turned), (torch.arange(2 * n) * n + sum(range(n))).view(2, n).t()[r : r + 1].contiguous())
    equal(comm.reduce_scatter(torch.arange(n) == r), torch.tensor([True]))
    for shape in ((0, 3), (n, 0), (2 * n, 0, 3)):
        assert comm.reduce_scatter(torch.empty(shape)).shape == (shape[0] // n, *shape[1:])
    part = comm.reduce_scatter(torch.ones(n))
    part.add_(1)  # the caller's own
    for wrong in (torch.tensor(1.0), torch.ones(n + 1), torch.ones(2 * n - 1, 2)):
        if wrong.dim() == 0 or wrong.shape[0] % n:
            with pytest.raises(ValueError, match=f"{n} equal parts"):
                comm.reduce_scatter(wrong)
    equal(comm.reduce_scatter(torch.ones(n)), torch.tensor([float(n)]))


def test_reduce_scatter_returns_this_ranks_part_and_keeps_its_input(world):
    world.run(scatter_reduced)


# ---- barrier ----------------------------------------------------------------------------------------------------------------


def pass_barriers(comm):
    stamps = []
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.05)
        entered = time.monotonic()  # one clock for all processes of a machine
        comm.barrier()
        stamps.append((entered, time.monotonic()))
    return stamps


def test_nobody_leaves_a_barrier_before_the_last_has_entered(world):
    for stamps in zip(*world.run(pass_barriers), strict=True):
        assert min(left for _, left in stamps) >= max(entered for entered, _ in stamps)


# ---- wrong arguments --------------------------------------------------------------------------------------------------------


def wrong_reductions(comm, culprit):
    """Only `culprit` errs; nothing was sent, so the next call of all finds all in step."""
    if comm.rank == culprit:
        for x, op, error in [
            ([1.0, 2.0], "sum", TypeError),
            (None, "sum", TypeError),
            (3.0, "sum", TypeError),
            (torch.ones(3), "product", ValueError),
            (torch.ones(3), "SUM", ValueError),
            (torch.ones(3, dtype=torch.int32), "mean", TypeError),
            (torch.ones(3, dtype=torch.bool), "mean", TypeError),
            (torch.ones(3, dtype=torch.complex64), "max", TypeError),
            (torch.ones(3).to_sparse(), "sum", TypeError),
            (torch.ones(3, device="meta"), "sum", TypeError),
        ]:
            with pytest.raises(error):
                comm.all_reduce(x, op)
            with pytest.raises(error):
                comm.all_reduce_async(x, op)
            with pytest.raises((error, ValueError)):
                comm.reduce_scatter(x, op)
    equal(comm.all_reduce(torch.ones(3)), torch.full((3,), float(comm.size)))


def test_a_wrong_argument_raises_where_it_was_made_and_harms_nobody(world):
    for culprit in {0, world.size - 1}:
        world.run(wrong_reductions, culprit)
