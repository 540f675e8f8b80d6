"""A roll call: all remaining ranks ask each other, so that they start a collective with the same members and the same round.

They ask twice. If a rank dies or is cut off during the first round, all know it after the second. Each costs a rank p - 1
messages of a few bytes. Gossip itself never needs it, only what all ranks do together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip.membership import Membership

SLICE = 0.05  # seconds between two checks for requests of others


@dataclass(frozen=True, slots=True)
class Called:
    """The membership without the ranks that did not answer, the latest step, and the ranks that trained alone."""

    membership: Membership
    step: int
    alone: frozenset[int]


def roll_call(
    comm: Communicator, membership: Membership, step: int, tag: int, *, alone: bool, meanwhile: Callable[[], None]
) -> Called:
    """Ask all. Ranks that do not answer within the patience of `comm` are left out. `meanwhile` runs while this rank waits."""
    lonely = {comm.rank} if alone else set()
    for asking in range(2):
        mine = torch.tensor([step, int(alone), *membership.leaves])
        others = [rank for rank in range(comm.size) if rank != comm.rank and rank not in membership.gone]
        answers = {rank: torch.empty_like(mine) for rank in others}
        asked = {
            rank: comm.exchange_async(mine, rank, answer, rank, tag + asking, may_fail=True) for rank, answer in answers.items()
        }
        until = time.monotonic() + comm.patience
        for rank, pending in asked.items():
            while isinstance(error := pending.settle(min(SLICE, max(0.0, until - time.monotonic()))), TimeoutError):
                meanwhile()
                if time.monotonic() >= until:
                    break
            if error is not None:
                membership = (
                    membership.leave_out(rank, step) if isinstance(error, TimeoutError) else membership.mark_dead(rank, step)
                )
                continue
            theirs, said, *leaves = answers[rank].tolist()
            membership, step = membership.merge(leaves), max(step, theirs)
            lonely |= {rank} if said else set()
    return Called(membership, step, frozenset(lonely))
