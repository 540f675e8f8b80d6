"""An agent, without the processes that it starts."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from phalanx.comm.elastic import supervisor
from phalanx.comm.elastic.agents import End
from phalanx.comm.elastic.children import Children
from phalanx.comm.elastic.door import Door
from phalanx.comm.elastic.head import TOO_FEW, Head
from phalanx.comm.elastic.supervisor import Supervisor, _Host, pause_after


class Line:
    """Grants the number 100 more than wished, at once, and has no orders."""

    def __init__(self):
        self.keys = SimpleNamespace(
            claim_member=lambda agent, wish: wish + 100,
            ended=lambda member, end: None,
            started=lambda agent, members: None,
            leave=lambda agent, why: None,
        )

    def post(self, write):
        write(self.keys)

    def orders(self):
        return []

    def lost(self):
        return ""


class Dying(Children):
    """Members 0 and 1 end by the signal that the agent got too, one at once and the other one a moment later."""

    def __init__(self):
        super().__init__((), {}, processes={0: None, 1: None})
        self.begun, self.started = time.monotonic(), []

    def ended(self):
        over = {0} if time.monotonic() < self.begun + 0.1 else {0, 1}
        found = {member: End(-signal.SIGTERM) for member in over & self.running}
        self.codes.update(dict.fromkeys(found, -signal.SIGTERM))
        return found

    def start(self, member, point):
        self.started.append(member)
        self.processes[member] = None

    def signal(self, number):
        pass

    def kill(self):
        pass


def host_with(children, heard, budget):
    host = _Host(SimpleNamespace(budget=budget), None, None, children, heard)
    host._line, host._agent, host._begun = Line(), 0, True
    return host


@pytest.mark.parametrize("wanted", [0, 2])
def test_no_rank_starts_after_a_signal(wanted):
    children = Dying()
    host = host_with(children, [signal.SIGTERM], budget=5)
    for wish in range(wanted):  # ranks that have their numbers, and would start now
        host._want(wish)
    assert host._watch(None) == 128 + signal.SIGTERM
    assert children.started == []
    assert time.monotonic() - children.begun < 10, "it does not wait until the grace is over"


class Order:
    """A budget. `seen` gets what the head would read whenever it changes."""

    def __init__(self, budget):
        self._budget, self.seen, self.read = budget, [], lambda: 0

    @property
    def budget(self):
        return self._budget

    @budget.setter
    def budget(self, value):
        self._budget = value
        self.seen.append(self.read())


def test_the_head_knows_of_a_replacement_all_the_time():
    host = host_with(Children((), {}), [], budget=2)
    host._order = order = Order(2)
    order.read = host._to_come
    host._replace(0)
    host._replace(1)
    assert order.seen == [2, 2]


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setenv("PHALANX_SECRET", "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return Door("127.0.0.1", probe.getsockname()[1], hosts=2, holds=None)


def test_a_signal_ends_an_agent_that_is_about_to_return(door, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 30.0)
    monkeypatch.setattr(supervisor, "enter", lambda *arguments: (None, None))
    monkeypatch.setattr(_Host, "run", lambda self: threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start())
    begun = time.monotonic()
    assert Supervisor(1, [], door=door).run() == 128 + signal.SIGINT
    assert time.monotonic() - begun < 10
    assert f"returns to {door}" in capfd.readouterr().err


@pytest.mark.parametrize("holds", [None, True])
def test_the_meeting_point_opens_again_if_all_ranks_fell_silent(door, monkeypatch, capfd, holds):
    """The next job waits for its hosts. None comes."""
    points = []

    class Deserted(Head):
        def __init__(self, board, *arguments):
            super().__init__(board, *arguments)
            points.append(board.point)

        def look(self):
            self.deserted = len(points) == 1
            return None if self.deserted else super().look()

    monkeypatch.setattr(supervisor, "Head", Deserted)
    assert Supervisor(0, [], door=Door(door.host, door.port, 2, holds), wait=0.1).run() == TOO_FEW
    assert [point.port for point in points] == [door.port] * 2
    assert len({point.token for point in points}) == 2, "all see that it is another job"
    words = capfd.readouterr().err
    assert "0 of 2 hosts have come within 0.1 s" in words
    assert "returns to" not in words


def test_the_pause_before_coming_back_doubles_only_while_cuts_follow_each_other():
    pauses, pause = [], 0.0
    for inside in (60.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 60.0, 15.0, 15.1):
        pause = pause_after(pause, inside)
        pauses.append(pause)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0, 2.0, 1.0]
