"""A roll call: all who are left ask each other, so that they begin a collective with the same members and the same round.

Twice: who dies, or is cut off, while they ask the first time is known to all after the second. Each asking costs a rank p - 1
messages of a few bytes; gossip itself never needs it, only what all ranks do together.
"""

from __future__ import annotations

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.roll import Roll


def roll_call(comm: Communicator, roll: Roll, step: int, tag: int) -> tuple[Roll, int]:
    """The roll, with everybody struck who does not answer within the patience of `comm`, and the latest step of those who do."""
    for asking in range(2):
        mine = torch.tensor([step, *roll.leaves])
        others = [rank for rank in range(comm.size) if rank != comm.rank and rank not in roll.struck]
        answers = {rank: torch.empty_like(mine) for rank in others}
        asked = {
            rank: comm.exchange_async(mine, rank, answer, rank, tag + asking, may_fail=True) for rank, answer in answers.items()
        }
        for rank, pending in asked.items():
            if pending.settle(comm.patience) is not None:
                roll = roll.strike(rank, step)
                continue
            theirs, *leaves = answers[rank].tolist()
            roll, step = roll.merge(leaves), max(step, theirs)
    return roll, step
