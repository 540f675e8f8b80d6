"""An elastic communicator of one process, and arguments that make no sense."""

from __future__ import annotations

import pytest
import torch

import phalanx
from phalanx.comm.elastic.board import MeetingPoint, meeting_point
from phalanx.comm.launch import LaunchError


@pytest.fixture
def comm():
    with phalanx.create_communicator(elastic=True) as made:
        yield made


def test_a_world_of_one_is_elastic_too(comm):
    assert (comm.rank, comm.size, comm.member, comm.elastic, comm.is_new) == (0, 1, 0, True, False)
    assert comm.membership.ranks == (0,)
    assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert comm.allgather_obj("a") == ["a"]
    assert comm.bcast_obj({"b": 1}) == {"b": 1}
    comm.barrier()


def test_it_trains(comm):
    model = torch.nn.Linear(3, 2)
    opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    loader = phalanx.data.Loader((torch.ones(10, 3), torch.arange(10)), comm, batch=4, last="keep", workers=0)
    opt.share(model=model, loader=loader)
    for x, _ in loader:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
    assert opt.steps == 3
    assert opt.membership.epoch == 1
    assert len(opt.membership.history) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": phalanx.AllReduce(fused=True)}, "fused"),
        ({"sync": phalanx.Gossip(topology="hypercube")}, "changes the number of ranks"),
        ({"sync": phalanx.Gossip(patience=2.0)}, "no effect with elastic=True"),
        ({"sync": phalanx.Gossip(level="host")}, "cannot be split"),
        ({"sync": phalanx.LocalSGD(every=4, level="host")}, "cannot be split"),
        ({"sync": phalanx.DiLoCo(every=4, overlap=True)}, "use overlap=False"),
        ({"sync": phalanx.DiLoCo(every=4, start=10)}, "leave start out"),
        ({"wire": phalanx.Int8()}, "keeps what it rounded away"),
        ({"sync": phalanx.DiLoCo(every=4, wire=phalanx.Int8())}, "keeps what it rounded away"),
    ],
)
def test_what_does_not_go_together_is_refused(comm, options, words):
    with pytest.raises(ValueError, match=words):
        phalanx.create_multi_node_optimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), comm, **options)


def test_an_elastic_communicator_is_not_split(comm):
    with pytest.raises(ValueError, match="cannot be split"):
        comm.split(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_ranks": 0, "elastic": True}, "min_ranks=0"),
        ({"min_ranks": 3, "max_ranks": 2, "elastic": True}, "more than max_ranks"),
        ({"min_ranks": 2}, "for elastic=True"),
        ({"elastic": True, "backend": "nccl"}, "gloo"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        phalanx.create_communicator(**options)


def test_under_another_launcher(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="phalanx run"):
        phalanx.create_communicator(elastic=True)


def test_a_rank_of_phalanx_run_that_is_not_elastic(monkeypatch):
    monkeypatch.setenv("PHALANX_ELASTIC", "127.0.0.1/1/0123456789abcdef")
    with pytest.raises(LaunchError, match="pass elastic=True"):
        phalanx.create_communicator()


@pytest.mark.parametrize("text", ["", "host", "a/b/c", "h/1/xyz", "h/99999999/0123456789abcdef"])
def test_a_meeting_point_that_is_none(text):
    with pytest.raises(LaunchError, match="is not a meeting point"):
        meeting_point({"PHALANX_ELASTIC": text, "PHALANX_MEMBER": "0"})


def test_a_meeting_point():
    point = MeetingPoint("127.0.0.1", 4711, "0123456789abcdef")
    assert meeting_point({"PHALANX_ELASTIC": point.to_text(), "PHALANX_MEMBER": "3"}) == (point, 3)
    assert meeting_point({}) is None
