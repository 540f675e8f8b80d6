"""For tests of what an elastic job decides."""

from __future__ import annotations

import datetime
import secrets

import pytest

from phalanx.comm.addresses import listen
from phalanx.comm.elastic.board import Board, MeetingPoint
from phalanx.comm.rendezvous import serve


@pytest.fixture
def board(monkeypatch):
    """The board of a job, in the process that holds it."""
    monkeypatch.setenv("PHALANX_SECRET", secrets.token_hex(32))
    listener = listen("127.0.0.1", 0, 16)
    point = MeetingPoint("127.0.0.1", listener.getsockname()[1], secrets.token_hex(8))
    return Board(point, 10.0, serve(listener, point.host, 1, datetime.timedelta(seconds=10)))
