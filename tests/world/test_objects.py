"""Plain objects between ranks: they arrive as they left, and what is not plain raises before anything is sent."""

import collections
import enum
import math

import numpy
import pytest
import torch

Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    """An int to isinstance, but not to its receiver."""

    RED = 1


def plain(rank):
    """Something of everything, different on every rank."""
    return {
        "rank": rank,
        "none": None,
        "truth": [True, False],
        "integers": [0, -1, rank, -(2**63), 2**64, 10**400 + rank, -(10**400)],
        "floats": [0.0, -0.0, 1 / 3, math.inf, -math.inf, 5e-324, float(rank)],
        "text": ["", "ä€😀\0", "x" * 1000 * rank, "\udc80"],
        "bytes": [b"", bytes(range(256)), b"\0" * (100_000 if rank == 1 else 1)],
        "nested": ([], (), {}, [(1, [2, (3,)])], ((1, 2), [1, 2])),
        (1, ("key", rank)): {None: 1, True: 2, 2.5: 3, b"b": 4, (): 5},
    }


def same(a, b):
    """Equal, of the same types all the way down, and dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(i, j) for i, j in zip(a.items(), b.items()))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def test_the_comparison_can_fail():
    for a, b in [
        ((1,), [1]),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ({1: 1, 2: 2}, {2: 2, 1: 1}),
        ([[1, (2,)]], [[1, [2]]]),
        ("a", b"a"),
    ]:
        assert not same(a, b)
        assert same(a, a)


def carry_everything(comm):
    n, r = comm.size, comm.rank
    everybody = [plain(q) for q in range(n)]
    for root in range(n):
        assert same(comm.bcast_obj(plain(root) if r == root else None, root), plain(root))
        got = comm.gather_obj(plain(r), root)
        assert same(got, everybody if r == root else None)
        assert same(comm.scatter_obj(everybody if r == root else None, root), plain(r))
    assert same(comm.allgather_obj(plain(r)), everybody)
    assert same(comm.bcast_obj(math.nan), math.nan)
    if n > 1:
        if r == 0:
            for q in range(1, n):
                comm.send_obj(plain(q), q, tag=5)
                assert same(comm.recv_obj(q), plain(q))
        else:
            assert same(comm.recv_obj(0, tag=5), plain(r))
            comm.send_obj(plain(r), 0)


def test_every_plain_type_arrives_as_it_left_by_every_verb(world):
    world.run(carry_everything)


def reduce_objects(comm):
    n, r = comm.size, comm.rank
    assert comm.allreduce_obj(r) == n * (n - 1) // 2
    assert comm.allreduce_obj(10**50 * r) == 10**50 * (n * (n - 1) // 2)
    assert comm.allreduce_obj([r]) == list(range(n))  # in rank order
    assert comm.allreduce_obj((r,)) == tuple(range(n))
    assert comm.allreduce_obj(str(r)) == "".join(map(str, range(n)))
    assert comm.allreduce_obj(r, "max") == n - 1
    assert comm.allreduce_obj((r % 2, -r), "min") == (0, -((n - 1) // 2 * 2))
    assert comm.allreduce_obj(r, "mean") == (n - 1) / 2
    with pytest.raises(ValueError, match="product"):
        comm.allreduce_obj(r, "product")
    if n > 1:
        with pytest.raises(TypeError):  # on all ranks, after the exchange: nobody waits
            comm.allreduce_obj({"r": r})
    assert comm.allreduce_obj(0.1) == comm.bcast_obj(comm.allreduce_obj(0.1))


def test_objects_are_reduced_in_rank_order(world):
    world.run(reduce_objects)


def send_what_is_not_plain(comm, culprit):
    n = comm.size
    if comm.rank == culprit:
        for wrong in [
            numpy.float64(1.5),
            numpy.int64(1),
            numpy.zeros(2),
            torch.zeros(2),
            {1, 2},
            frozenset(),
            Point(1, 2),
            Colour.RED,
            collections.OrderedDict(a=1),
            bytearray(b"x"),
            memoryview(b"x"),
            1j,
            range(3),
            len,
            object(),
        ]:
            for hidden in (wrong, [1, (wrong,)], {"key": wrong}):
                for call in (comm.allgather_obj, comm.gather_obj, comm.allreduce_obj, lambda x: comm.bcast_obj(x, comm.rank)):
                    with pytest.raises(TypeError, match="None, bool, int"):
                        call(hidden)
                with pytest.raises(TypeError):
                    comm.send_obj(hidden, (comm.rank + 1) % n)
                with pytest.raises(TypeError):
                    comm.scatter_obj([1] * (n - 1) + [hidden], comm.rank)
        endless = []
        endless.append(endless)
        with pytest.raises(TypeError, match="cycle"):
            comm.allgather_obj(endless)
        for objs in ([1] * (n + 1), [], None):
            with pytest.raises(ValueError, match=f"list of {n}"):
                comm.scatter_obj(objs, comm.rank)
        with pytest.raises(ValueError, match="root"):
            comm.bcast_obj(1, root=n)
    assert comm.allgather_obj(comm.rank) == list(range(n))


def test_other_types_raise_before_sending_and_harm_nobody(world):
    for culprit in {0, world.size - 1}:
        world.run(send_what_is_not_plain, culprit)
