"""A barrier: one call of the native core if all ranks share memory, otherwise the smallest all-reduce."""

from __future__ import annotations

import torch

from phalanx.comm.operations import Operations, digest_of
from phalanx.comm.pending import Operation
from phalanx.comm.reductions import Reductions
from phalanx.comm.streams import StreamOrder
from phalanx.native.errors import Disagreement
from phalanx.native.team import HostTeam

NAME = "barrier()"
DIGEST = digest_of(NAME)


def wait_for_all(operations: Operations, reductions: Reductions) -> None:
    """Return when all ranks have called it."""
    team = reductions.direct
    if team is None:
        work = lambda tag: reductions.reduce(torch.zeros(1), "sum", reductions.smallest, tag)  # noqa: E731
        operations.start(NAME, work).wait()
    elif operations.debug or operations.closed or not operations.issuer.idle:
        operations.start(NAME, lambda tag: team.barrier()).wait()
    else:
        _in_this_thread(operations, team)


def _in_this_thread(operations: Operations, team: HostTeam) -> None:
    """Waking another thread takes longer than the barrier. With more ranks than cores, ranks then leave it milliseconds apart."""
    operations.number += 1
    number, members = operations.number, operations.members

    def describe() -> Operation:
        return Operation(members.name, number, NAME, members.in_world, lambda: None, StreamOrder())

    def meet() -> None:
        team.set_topic(DIGEST, number, describe)
        team.barrier()

    try:
        operations.issuer.directly(meet, describe)
    except Disagreement as error:
        raise operations.disagreement(NAME, error) from None
