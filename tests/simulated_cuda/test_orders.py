"""2,048 ranks on 256 hosts make their groups in one order: torch's `fake` backend, one rank of the job after another.

NCCL wants that all ranks call `new_group` in one order, and that two ranks call the operations of the groups they share in one
order. The transport is the product's, the process group talks to nobody, and what it was asked for is compared.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx
from phalanx.comm.choose import choose
from phalanx.comm.connection import prepare
from phalanx.comm.hosts import Hosts
from phalanx.comm.transports.torch import TorchTransport

HOSTS, WIDTH = 256, 8
WORLD = HOSTS * WIDTH
SOME = (0, 1001, WORLD - 1)


def record(rank, schedules, monkeypatch):
    """What rank `rank` of the job asks torch.distributed for while it prepares for `schedules`."""
    calls = []
    made = {}
    new_group = dist.new_group

    def noted_new_group(ranks=None, **options):
        calls.append(("new_group", tuple(ranks or range(WORLD))))
        group = new_group(ranks, **(options | {"backend": "fake"}))
        made[id(group)] = tuple(ranks or range(WORLD))
        return group

    def noted_all_reduce(x, op=dist.ReduceOp.SUM, group=None):
        calls.append(("all_reduce", made.get(id(group), tuple(range(WORLD)))))

    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        with monkeypatch.context() as patch:
            patch.setenv("PHALANX_FORM", "collectives")
            patch.setattr(dist, "new_group", noted_new_group)
            patch.setattr(dist, "all_reduce", noted_all_reduce)
            transport = TorchTransport(FakeStore(), None, timeout=60.0)
            transport._cuda = True  # warm the groups up, as with NCCL
            patch.setattr(TorchTransport, "device", torch.device("cpu"))
            transport._collectives = None
            for schedule in schedules:
                prepare(transport, range(WORLD), schedule)
    finally:
        dist.destroy_process_group()
    return calls


def disagreements(calls):
    """Pairs of ranks that make groups in different orders, or call the operations of shared groups in different orders."""
    found = []
    for (a, mine), (b, theirs) in itertools.combinations(calls.items(), 2):
        made = [[group for kind, group in x if kind == "new_group"] for x in (mine, theirs)]
        ran = [[group for kind, group in x if kind == "all_reduce" and a in group and b in group] for x in (mine, theirs)]
        if made[0] != made[1] or ran[0] != ran[1]:
            found.append((a, b))
    return found


def test_groups_of_2048_ranks_are_made_in_one_order(monkeypatch):
    hosts = Hosts.of([f"host {rank // WIDTH}" for rank in range(WORLD)])
    schedules = [choose(hosts, library=True).schedule, phalanx.torus(HOSTS, WIDTH)]
    calls = {rank: record(rank, schedules, monkeypatch) for rank in SOME}
    assert sum(kind == "new_group" for kind, _ in calls[0]) >= HOSTS + WIDTH
    assert disagreements(calls) == []


@pytest.mark.parametrize(
    "theirs",
    [
        [("new_group", (1, 2)), ("new_group", (0, 1))],  # another order
        [("new_group", (0, 1))],  # one is missing
        [("new_group", (0, 1)), ("new_group", (1, 2)), ("all_reduce", (0, 1))],  # an operation that rank 0 does not call
    ],
)
def test_another_order_is_found(theirs):
    calls = {0: [("new_group", (0, 1)), ("new_group", (1, 2))], 1: theirs}
    assert disagreements(calls) == [(0, 1)]
