"""A rank that dies before its agent has read that the job began is replaced as soon as the agent knows."""

import queue
from types import SimpleNamespace

import pytest

from phalanx.comm.elastic.agents import Order
from phalanx.comm.elastic.children import Children
from phalanx.comm.elastic.supervisor import _Host


@pytest.mark.parametrize(("budget", "replaced"), [(2, [4]), (0, [])])
def test_a_death_before_the_order_to_begin(budget, replaced):
    host = _Host(SimpleNamespace(budget=budget), None, None, Children((), {}), [])
    posted = queue.SimpleQueue()
    host._line = SimpleNamespace(post=posted.put)
    host._agent = 0
    host._replace(3)  # a member of the first world
    host._replace(7)  # it failed before there was a world: its script is wrong, and would fail again
    assert posted.empty()
    assert host._obey([Order("begin", members=(0, 1, 2, 3))]) is None
    wishes = []
    while not posted.empty():
        posted.get()(SimpleNamespace(claim_member=lambda agent, wish: wishes.append(wish)))
    assert wishes == replaced
