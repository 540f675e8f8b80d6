"""A barrier: one call of the native core if all ranks share memory, otherwise the smallest all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.comm.operations import Operations, digest_of
from phalanx.comm.reductions import Reductions

NAME = "barrier()"
DIGEST = digest_of(NAME)


def wait_for_all(operations: Operations, reductions: Reductions) -> None:
    """Return when all ranks have called it."""
    team = reductions.direct
    if team is None:
        work = lambda tag: reductions.reduce(torch.zeros(1), "sum", reductions.smallest, tag)  # noqa: E731
        operations.start(NAME, work).wait()
        return
    if not operations.may_run_here:
        operations.start(NAME, lambda tag: team.barrier()).wait()
        return

    def meet(number: int, text: Callable[[], object]) -> None:
        team.set_topic(DIGEST, number, text)
        team.barrier()

    # in another thread, ranks that share cores would leave it milliseconds apart
    operations.run_here(lambda: NAME, meet)
