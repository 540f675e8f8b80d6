"""How a process joins an elastic job, and how it becomes a job of its own without `phalanx run`."""

from __future__ import annotations

import datetime
import os
import secrets

from phalanx.comm.addresses import listen
from phalanx.comm.elastic.board import Board, MeetingPoint, Ready, meeting_point
from phalanx.comm.elastic.communicator import ElasticCommunicator
from phalanx.comm.elastic.coordinator import Coordinator
from phalanx.comm.elastic.passage import Passage
from phalanx.comm.launch import SECRET, LaunchError, discover
from phalanx.comm.rendezvous import serve
from phalanx.comm.start import end_with_agent
from phalanx.schedule import Schedule


def create_elastic_communicator(
    algorithm: Schedule | None, *, timeout: float, min_ranks: int, max_ranks: int | None
) -> ElasticCommunicator:
    """Join the job that `phalanx run` started this process for. Without one, form a world of one."""
    ready = Ready(min_ranks, max_ranks, timeout)
    found = meeting_point()
    if found is None:
        return _alone(algorithm, ready, timeout)
    end_with_agent()
    point, member = found
    return ElasticCommunicator(Passage(Board(point, timeout), member, ready, algorithm, timeout))


def _alone(algorithm: Schedule | None, ready: Ready, timeout: float) -> ElasticCommunicator:
    """A job of one member, which decides about itself: nothing supervises it, and nothing can join."""
    launch = discover()
    if launch.world > 1:
        raise LaunchError(
            f"elastic=True: {launch.how} started {launch.world} ranks, and would end them all when one dies. "
            "Start them with `phalanx run --ranks N SCRIPT`, which replaces dead ranks"
        )
    if ready.least > 1:
        raise LaunchError(f"min_ranks={ready.least}, but this process is alone: start it with `phalanx run --ranks N SCRIPT`")
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    listener = listen("127.0.0.1", 0, 16)
    point = MeetingPoint("127.0.0.1", listener.getsockname()[1], secrets.token_hex(8))
    store = serve(listener, point.host, 1, datetime.timedelta(seconds=timeout))
    board = Board(point, timeout, store)
    coordinator = Coordinator(board, first=1)
    coordinator.expect(0)
    board.be_ready(0, ready)
    coordinator.look()
    made = ElasticCommunicator(Passage(Board(point, timeout), 0, ready, algorithm, timeout, is_new=False))
    made.store = store
    return made
