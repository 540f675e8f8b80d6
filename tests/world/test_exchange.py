"""Tensors whose shape the receiver does not know: bcast, gather, allgather, scatter, alltoall, send and recv."""

import os

import pytest
import torch
from tests.world.test_reductions import COMPLEX, FLOATS, INTEGERS, equal

import phalanx

DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
LARGE = 20_001  # float32s: more than a broadcast sends along a tree


def token(i, j=0):
    """A tensor that tells where it comes from; its shape and dtype differ from rank to rank, and some are empty."""
    dtype = DTYPES[(i + 3 * j) % len(DTYPES)]
    shape = [(), (i + 1,), (0,), (2, j + 1), (3, 0, 2), (i + 1, 1, j + 2), (9000 + i,)][(i + 2 * j) % 7]
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + 10 * i + j).to(dtype).view(shape)


# ---- bcast ------------------------------------------------------------------------------------------------------------------


def bcast_all(comm):
    for root in range(comm.size):
        for wanted in (torch.arange(6.0).view(2, 3) + root, torch.arange(LARGE) + root, torch.tensor(7.5), torch.empty(0, 3)):
            mine = wanted.clone() if comm.rank == root else None
            got = comm.bcast(mine, root)
            equal(got, wanted)
            assert comm.rank != root or got is mine
            offered = wanted.clone() if comm.rank == root else torch.zeros_like(wanted)
            assert comm.bcast(offered, root) is offered
            equal(offered, wanted)
    for dtype in DTYPES:
        wanted = (torch.arange(5) % 2).to(dtype)
        equal(comm.bcast(wanted if comm.rank == 0 else None), wanted)


def test_bcast_from_every_root_to_none_and_to_tensors_that_it_fills(world):
    world.run(bcast_all)


def bcast_layouts(comm, root):
    for rows in (4, 400):
        wanted = torch.arange(rows * 60.0).view(rows, 60)
        x = wanted.t().contiguous().t() if comm.rank == root else torch.zeros(60, rows).t()
        assert comm.bcast(x, root) is x
        equal(x, wanted)
        whole = torch.full((rows, 62), -1.0)
        comm.bcast(wanted if comm.rank == root else whole[:, 1:-1], root)
        if comm.rank != root:
            equal(whole[:, 1:-1], wanted)
            assert whole[:, 0].eq(-1).all()
            assert whole[:, -1].eq(-1).all()
    leaf = torch.nn.Parameter(torch.full((3,), float(comm.rank)))
    assert comm.bcast(leaf, root) is leaf
    assert leaf.requires_grad
    assert leaf.is_leaf
    equal(leaf.detach(), torch.full((3,), float(root)))
    received = comm.bcast(leaf if comm.rank == root else None, root)
    assert received is leaf or not received.requires_grad


def test_bcast_of_any_layout_and_of_leaves(world):
    for root in {0, world.size - 1}:
        world.run(bcast_layouts, root)


def bcast_expanded(comm):
    x = torch.tensor([[3.0]]).expand(2, 5)
    equal(comm.bcast(x if comm.rank == 0 else None), torch.full((2, 5), 3.0))
    if comm.size > 1 and comm.rank == 1:
        with pytest.raises(ValueError, match=r"clone\(\)|contiguous\(\)"):
            comm.bcast(torch.zeros(1).expand(3), 0)
    equal(comm.bcast(torch.ones(3)), torch.ones(3))


def test_an_expanded_tensor_can_be_sent_but_not_filled(world):
    world.run(bcast_expanded)


def bcast_to_wrong(comm):
    last = comm.size - 1
    everywhere = comm.shares_memory or "PHALANX_DEBUG" in os.environ
    for sent in (torch.arange(6.0), torch.arange(float(LARGE))):
        for offered in (torch.zeros(7), torch.zeros(2, 3), torch.zeros(6, dtype=torch.float64), torch.tensor(0.0)):
            if comm.rank == last and last > 0:
                before = offered.clone()
                with pytest.raises(ValueError, match=f"rank {comm.rank} offered"):
                    comm.bcast(offered)
                equal(offered, before)
            elif comm.size > 1 and everywhere:
                with pytest.raises(phalanx.CommunicationError, match=f"rank {last} offered") as caught:
                    comm.bcast(sent if comm.rank == 0 else None)
                assert caught.value.missing == (last,)
            else:
                equal(comm.bcast(sent if comm.rank == 0 else None), sent)
            equal(comm.all_reduce(torch.ones(2)), torch.full((2,), float(comm.size)))


def test_a_receiver_of_another_shape_is_named(world):
    world.run(bcast_to_wrong)


@pytest.mark.parametrize("env", [{"PHALANX_NATIVE": "0"}, {"PHALANX_NATIVE": "0", "PHALANX_DEBUG": "1"}, {"PHALANX_DEBUG": "1"}])
def test_so_it_is_without_shared_memory_and_on_all_ranks_when_debugging(pools, env):
    pools.of(3, **env).run(bcast_to_wrong)


# ---- gather, allgather, scatter, alltoall -----------------------------------------------------------------------------------


def gather_all(comm):
    n, r = comm.size, comm.rank
    for root in range(n):
        got = comm.gather(token(r, root), root)
        if r == root:
            assert isinstance(got, list)
            for q, x in enumerate(got):
                equal(x, token(q, root))
        else:
            assert got is None
    for k in range(3):
        got = comm.allgather(token(r, k))
        assert isinstance(got, list)
        assert len(got) == n
        for q, x in enumerate(got):
            equal(x, token(q, k))


def test_gather_to_every_root_and_allgather_of_differing_shapes_and_dtypes(world):
    world.run(gather_all)


def scatter_all(comm):
    n, r = comm.size, comm.rank
    for root in range(n):
        equal(comm.scatter([token(root, q) for q in range(n)] if r == root else None, root), token(root, r))
    equal(comm.scatter(tuple(torch.full((2,), float(q)) for q in range(n)) if r == 0 else None), torch.full((2,), float(r)))


def test_scatter_from_every_root(world):
    world.run(scatter_all)


def alltoall_all(comm):
    n, r = comm.size, comm.rank
    for k in range(2):
        got = comm.alltoall([token(r + k, q) for q in range(n)])
        assert len(got) == n
        for q, x in enumerate(got):
            equal(x, token(q + k, r))
    for x in comm.alltoall([torch.empty(0)] * n):
        assert x.shape == (0,)


def test_alltoall_is_the_transpose(world):
    world.run(alltoall_all)


def results_are_the_callers_own(comm):
    """What comes back may be written to without an effect on what went in."""
    n, r = comm.size, comm.rank
    x = torch.zeros(3)
    for got in (comm.allgather(x), comm.gather(x) or [], comm.alltoall([x] * n), [comm.scatter([x] * n if r == 0 else None)]):
        for y in got:
            y.add_(1)
    equal(x, torch.zeros(3))


def test_results_do_not_share_memory_with_arguments(world):
    world.run(results_are_the_callers_own)


def exchange_layouts(comm):
    n, r = comm.size, comm.rank
    turned = (torch.arange(12.0) + r).view(3, 4).t()
    leaf = torch.nn.Parameter(torch.full((2,), float(r)))
    last = torch.tensor(float(r)).expand(3)
    for q, x in enumerate(comm.allgather(turned)):
        equal(x, (torch.arange(12.0) + q).view(3, 4).t().contiguous())
    for q, x in enumerate(comm.allgather(leaf)):
        equal(x, torch.full((2,), float(q)))
        assert not x.requires_grad
    for q, x in enumerate(comm.alltoall([last] * n)):
        equal(x, torch.full((3,), float(q)))


def test_any_layout_can_be_sent_and_arrives_without_grad(world):
    world.run(exchange_layouts)


def exchange_conjugated(comm):
    """A lazily conjugated or negated view keeps its sign in a bit that does not travel."""
    x = torch.tensor([1 + 2j, 3 - 1j])
    for y in (x.conj(), x.conj().imag):
        for got in (*comm.allgather(y), comm.bcast(y if comm.rank == 0 else None)):
            equal(got.clone(), y.clone())
    total = comm.all_reduce(x.clone().conj())
    equal(total.clone(), (x.conj() * comm.size).clone())


def test_a_conjugated_view_arrives_conjugated(world):
    world.run(exchange_conjugated)


# ---- send and recv ----------------------------------------------------------------------------------------------------------


def ring(comm):
    n, r = comm.size, comm.rank
    after, before = (r + 1) % n, (r - 1) % n
    for k in range(5):
        x = token(r, k)
        if r % 2 == 0 and not (n % 2 == 1 and r == n - 1):  # a send waits for its receiver: somebody has to receive first
            comm.send(x, after, tag=k)
            got = comm.recv(before, tag=k)
        else:
            got = comm.recv(before, tag=k)
            comm.send(x, after, tag=k)
        equal(got, token(before, k))


def test_send_and_recv_around_a_ring_with_tags(world):
    if world.size > 1:
        world.run(ring)


def pairs_out_of_order(comm):
    """Rank 0 serves the others from the last to the first, each with its own tag; each pair has its own order."""
    n, r = comm.size, comm.rank
    if r == 0:
        for q in reversed(range(1, n)):
            for k in range(4):
                comm.send(token(q, k), q, tag=100 - q)
        for q in reversed(range(1, n)):
            equal(comm.recv(q, tag=q), token(q))
    else:
        for k in range(4):
            equal(comm.recv(0, tag=100 - r), token(r, k))
        comm.send(token(r), 0, tag=r)


def test_messages_of_a_pair_keep_their_order_and_pairs_have_none(world):
    world.run(pairs_out_of_order)


def tags_apart(comm):
    """The same pair, two tags, opposite directions at once: each message meets the receive of its own tag."""
    if comm.rank > 1:
        return
    other = 1 - comm.rank
    for k in range(3):
        if comm.rank == 0:
            comm.send(torch.full((2,), 1.0), other, tag=1)
            comm.send(torch.full((3,), 2.0), other, tag=2)
            equal(comm.recv(other, tag=1), torch.full((4,), 3.0))
        else:
            equal(comm.recv(other, tag=1), torch.full((2,), 1.0))
            equal(comm.recv(other, tag=2), torch.full((3,), 2.0))
            comm.send(torch.full((4,), 3.0), other, tag=1)
        assert k < 3


def test_tags_keep_messages_apart(world):
    if world.size > 1:
        world.run(tags_apart)


def between_collectives(comm):
    """Some ranks exchange messages in between: the numbering of collectives must not notice."""
    for k in range(3):
        if comm.rank == 0 and comm.size > 1:
            comm.send(torch.full((k,), 1.0), comm.size - 1)
        elif comm.rank == comm.size - 1 and comm.size > 1:
            equal(comm.recv(0), torch.full((k,), 1.0))
        equal(comm.all_reduce(torch.ones(2)), torch.full((2,), float(comm.size)))


def test_messages_between_collectives(world):
    world.run(between_collectives)


# ---- wrong arguments --------------------------------------------------------------------------------------------------------


def wrong_exchanges(comm, culprit):
    n, x = comm.size, torch.ones(2)
    if comm.rank == culprit:
        for root in (-1, n, 0.0, None, "0"):
            for call in (comm.bcast, comm.gather, lambda x, root: comm.scatter([x] * n, root)):
                with pytest.raises(ValueError, match=f"0 to {n - 1}"):
                    call(x, root)
        for peer in (-1, n, None, comm.rank):
            with pytest.raises(ValueError, match="dest"):
                comm.send(x, peer)
            with pytest.raises(ValueError, match="source"):
                comm.recv(peer)
        for xs in ([x] * (n + 1), [x] * (n - 1), None, x, "a" * n):
            with pytest.raises((ValueError, TypeError)):
                comm.alltoall(xs)
            with pytest.raises((ValueError, TypeError)):
                comm.scatter(xs, comm.rank)
        if n > 1:
            with pytest.raises(ValueError, match="must pass None"):
                comm.scatter([x] * n, (comm.rank + 1) % n)
        for wrong in (1.0, [1.0], "x", x.to_sparse(), torch.zeros(2, dtype=torch.uint16), torch.zeros(2, device="meta")):
            for call in (comm.gather, comm.allgather, lambda y: comm.bcast(y, comm.rank), lambda y: comm.alltoall([y] * n)):
                with pytest.raises(TypeError):
                    call(wrong)
            with pytest.raises(TypeError):
                comm.send(wrong, (comm.rank + 1) % n)
        with pytest.raises(TypeError):
            comm.bcast(None, comm.rank)
    assert [y.tolist() for y in comm.allgather(torch.tensor([comm.rank]))] == [[q] for q in range(n)]


def test_a_wrong_argument_raises_where_it_was_made_and_harms_nobody(world):
    for culprit in {0, world.size - 1}:
        world.run(wrong_exchanges, culprit)
