"""Processes that cannot start, because there are too many already."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from phalanx.comm.elastic import spares
from phalanx.comm.elastic.board import MeetingPoint
from phalanx.comm.elastic.children import NOT_STARTED, Children
from phalanx.comm.elastic.spares import Spares


@pytest.fixture(params=[errno.EAGAIN, errno.ENOMEM], ids=errno.errorcode.get)
def why(request, monkeypatch):
    def start(*arguments, **options):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(spares.subprocess, "Popen", start)
    return os.strerror(request.param)


def test_a_rank_that_cannot_start_has_ended(why, capfd):
    children = Children(["script.py"], {})
    children.start(3, MeetingPoint("127.0.0.1", 1, "0" * 16))
    assert f"phalanx: member 3 cannot start ({why})" in capfd.readouterr().err
    assert children.running == {3}
    children.signal(15)
    assert {member: end.code for member, end in children.ended().items()} == {3: NOT_STARTED}
    assert not children.running
    assert not children.ended()
    children.kill()


def test_a_spare_that_cannot_start_is_tried_ever_more_seldom(why, capfd, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(spares, "time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = Spares([], {}, count=1)
    for after in (10, 20, 40):
        kept.keep(1)
        assert capfd.readouterr().err == f"phalanx: a spare process cannot start ({why}); another one starts in {after} s\n"
        now[0] += after - 0.1
        kept.keep(1)
        assert capfd.readouterr().err == ""
        now[0] += 0.2
    assert kept.take({}) is None
