"""A rank that joins loads the state of the others again if one of them dies before all are in the new world."""

from __future__ import annotations

import pytest
import torch

import phalanx


@pytest.fixture
def comm():
    with phalanx.create_communicator(elastic=True) as made:
        yield made


def made(comm, **options):
    model = torch.nn.Linear(3, 2)
    return model, phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, **options)


@pytest.mark.parametrize("options", [{"double_buffering": True}, {"sync": phalanx.Gossip()}], ids=["double buffering", "gossip"])
@pytest.mark.parametrize("states", ["in flight, in flight", "in flight, landed", "landed, in flight", "landed, landed"])
def test_the_last_state_counts(comm, options, states):
    model, other = made(comm, **options)
    found = {}
    for _ in range(2):
        other.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        other.step()
    found["in flight"] = other.own_state()
    assert comm.in_flight == 1
    comm.land()
    found["landed"] = other.own_state()
    assert comm.in_flight == 0

    _, joins = made(comm, **options)
    for state in states.split(", "):
        joins.load_own_state(found[state])
        assert comm.in_flight == (state == "in flight")
    before = comm.exchanges
    comm.land()
    assert comm.exchanges - before == states.endswith("in flight")
    assert comm.in_flight == 0
