"""The issuing thread after a failure that ends all communication."""

import threading
import time

import pytest

from phalanx import CommunicationError
from phalanx.comm.issuer import Issuer
from phalanx.comm.pending import Operation
from phalanx.comm.streams import StreamOrder
from phalanx.comm.transports import TransportError


def operation(name, work):
    return Operation("world", 1, name, {0: 0, 1: 1}, work, StreamOrder())


def breaks():
    raise TransportError("the other rank is gone")


def test_what_is_queued_behind_a_failure_that_nobody_has_waited_for_fails_at_once():
    """A step may start several reductions before it waits for the first: none of them may wait for a thread that is done."""
    issuer = Issuer(60.0, None)
    ran = []
    first = issuer.submit(operation("first", breaks))
    second = issuer.submit(operation("second", lambda: ran.append("second")))
    until = time.monotonic() + 30
    while not first.done():
        assert time.monotonic() < until
        time.sleep(0.01)
    third = issuer.submit(operation("third", lambda: ran.append("third")))
    for pending in (third, second, first):
        with pytest.raises(CommunicationError, match="the other rank is gone"):
            pending.wait()
    assert ran == []
    with pytest.raises(CommunicationError, match="cannot start"):
        issuer.submit(operation("fourth", lambda: None))


def test_a_wait_that_does_not_notice_that_its_connections_were_cut_is_left_alone():
    """gloo may miss a cut at the moment when a message is posted: an elastic job would stand still."""
    stuck = threading.Event()
    cuts = []
    issuer = Issuer(60.0, None, lambda: cuts.append("again"))
    pending = issuer.submit(operation("allgather()", stuck.wait))
    try:
        issuer.breakdown.cut_since = time.monotonic()
        begun = time.monotonic()
        with pytest.raises(CommunicationError, match=r"allgather\(\) failed: its connections were cut"):
            pending.wait()
        assert time.monotonic() - begun < 30
        assert cuts == ["again"]
    finally:
        stuck.set()
