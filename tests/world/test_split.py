"""Split communicators: who is in them, in which order, and that parent and children do not disturb each other."""

import threading
import time

import pytest
import torch
from tests.world.test_reductions import LARGE, equal

import phalanx


def split_by_parity(comm):
    n, r = comm.size, comm.rank
    child = comm.split(r % 2)
    mine = [q for q in range(n) if q % 2 == r % 2]
    assert child.size == len(mine)
    assert child.rank == mine.index(r)
    assert child.allgather_obj(r) == mine
    for count in (3, LARGE):
        equal(child.all_reduce(torch.full((count,), float(r))), torch.full((count,), float(sum(mine))))
    equal(child.bcast(torch.full((4,), float(r)), child.size - 1), torch.full((4,), float(mine[-1])))
    equal(child.reduce_scatter(torch.ones(2 * child.size)), torch.full((2,), float(child.size)))
    assert [x.item() for x in child.alltoall([torch.tensor(r * 10 + q) for q in range(child.size)])] == [
        q * 10 + child.rank for q in mine
    ]
    child.barrier()
    assert child.intra_size == child.size
    assert child.inter_size == 1
    assert comm.allgather_obj(r) == list(range(n))


def test_ranks_of_one_colour_form_a_world(world):
    world.run(split_by_parity)


def split_with_keys(comm):
    n, r = comm.size, comm.rank
    turned = comm.split(0, key=-r)
    assert (turned.rank, turned.size) == (n - 1 - r, n)
    assert turned.allgather_obj(r) == list(reversed(range(n)))
    for root in {0, n - 1}:
        assert turned.bcast_obj(r if turned.rank == root else None, root) == n - 1 - root
    equal(turned.all_reduce(torch.full((LARGE,), float(r))), torch.full((LARGE,), float(sum(range(n)))))
    assert comm.split(0, key=7).allgather_obj(r) == list(range(n))  # equal keys: by rank
    alone = comm.split(r)
    assert (alone.rank, alone.size) == (0, 1)
    equal(alone.all_reduce(torch.full((3,), float(r))), torch.full((3,), float(r)))
    far = comm.split(-(10**12) if r == 0 else 10**12)
    assert far.size == (1 if r == 0 else n - 1)


def test_keys_order_and_colours_are_any_integers(world):
    world.run(split_with_keys)


def split_again(comm):
    n, r = comm.size, comm.rank
    rows = comm.split(r // 2)
    single = rows.split(rows.rank, key=r)
    assert single.size == 1
    columns = comm.split(r % 2)
    again = columns.split(0, key=-columns.rank)
    mine = [q for q in reversed(range(n)) if q % 2 == r % 2]
    assert again.allgather_obj(r) == mine
    equal(again.all_reduce(torch.tensor([float(r)])), torch.tensor([float(sum(mine))]))
    same = comm
    for _ in range(5):
        same = same.split(0)
    assert same.allgather_obj(r) == list(range(n))


def test_split_of_a_split(world):
    world.run(split_again)


def interleave(comm):
    """All in flight at once, waited for in another order."""
    n, r = comm.size, comm.rank
    rows, columns = comm.split(r // 2), comm.split(r % 2)
    mates = {"rows": [q for q in range(n) if q // 2 == r // 2], "columns": [q for q in range(n) if q % 2 == r % 2]}
    flights = []
    for k in range(4):
        for child, members in ((comm, range(n)), (rows, mates["rows"]), (columns, mates["columns"])):
            x = torch.full((50 if k % 2 else LARGE,), float(r + k))
            flights.append((child.all_reduce_async(x), float(sum(members) + k * len(members))))
    for pending, wanted in reversed(flights):
        x = pending.wait()
        equal(x, torch.full_like(x, wanted))
    comm.barrier()


def test_collectives_of_parent_and_children_interleave(world):
    world.run(interleave)


def close_children(comm):
    n, r = comm.size, comm.rank
    child = comm.split(0)
    child.close()
    child.close()
    with pytest.raises(RuntimeError, match="closed"):
        child.barrier()
    with comm.split(r % 2) as other:
        other.barrier()
    with pytest.raises(RuntimeError, match="closed"):
        other.all_reduce(torch.ones(1))
    assert comm.allgather_obj(r) == list(range(n))


def test_closing_a_child_leaves_its_parent_open(world):
    world.run(close_children)


def keep_options(comm):
    n, r = comm.size, comm.rank
    with phalanx.create_communicator(phalanx.tree(n), timeout=20) as other:
        turned = other.split(0, key=-r)
        assert turned.schedule == other.schedule == phalanx.tree(n)
        equal(turned.all_reduce(torch.full((LARGE,), float(r))), torch.full((LARGE,), float(sum(range(n)))))
        half = other.split(r % 2)
        assert half.schedule.world == half.size  # a schedule is for one world size: a smaller child chooses anew
        equal(half.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(half.size)))
    comm.barrier()


def test_a_child_keeps_the_algorithm(world):
    world.run(keep_options)


def split_wrongly(comm, culprit):
    if comm.rank == culprit:
        for wrong in ({"color": "a"}, {"color": None}, {"color": 1.0}, {"color": 0, "key": "b"}):
            with pytest.raises(TypeError, match="ints"):
                comm.split(**wrong)
    assert comm.split(0).size == comm.size


def test_a_wrong_argument_raises_where_it_was_made_and_harms_nobody(world):
    for culprit in {0, world.size - 1}:
        world.run(split_wrongly, culprit)


# ---- on threads: what breaks a communicator -----------------------------------------------------------------------------------


def test_a_child_keeps_the_timeout():
    given_up = threading.Event()

    def lonely(comm):
        child = comm.split(0)
        if comm.rank == 0:
            assert given_up.wait(60)
            return None
        begun = time.monotonic()
        with pytest.raises(phalanx.CommunicationError, match="rank 0") as caught:
            child.all_reduce(torch.ones(2))
        given_up.set()
        assert caught.value.missing == (0,)
        return time.monotonic() - begun

    assert phalanx.run_local(2, lonely, timeout=0.8)[1] < 10  # others wait for minutes


def test_a_grandchild_is_closed_with_its_grandparent():
    def close_the_root(comm):
        grandchild = comm.split(0).split(0)
        comm.close()
        with pytest.raises(RuntimeError, match="this communicator is closed"):
            grandchild.barrier()

    phalanx.run_local(2, close_the_root, timeout=1.0)


def drop_while_under_way(comm):
    n = comm.size
    for _ in range(5):
        pending = comm.split(0).all_reduce_async(torch.full((LARGE,), 1.0))  # only the operation knows the split communicator
        equal(pending.wait(), torch.full((LARGE,), float(n)))


def test_an_operation_keeps_a_dropped_communicator_until_it_is_done(world):
    world.run(drop_while_under_way)
