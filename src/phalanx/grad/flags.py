"""Flags that the ranks exchange along with their gradients.

A rank writes 1 or 0, and a flag comes back nonzero if any rank wrote 1:

    SENT_AGAIN              a gradient came after its group was sent: all ranks send all groups again
    IN_BACKWARD, AT_STEP    if both are set, some ranks are at their step and wait for ranks that are still in a backward
    NOT_FINITE              a rank has NaN or inf in its own gradients

The element before them is for the weight of a rank, if gradients count by samples (`weights.py`).

On the CPU they are sent in the last elements of the last group. On a GPU they are sent in their own message between the hosts'
memories: to read them from the group, the host would have to wait for the device. A wire that rounds a 1 to 0 needs that, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.arena import FLAGS

WEIGHT, SENT_AGAIN, IN_BACKWARD, AT_STEP, NOT_FINITE = range(-FLAGS, 0)


@dataclass(frozen=True, slots=True)
class Said:
    """The flags of all ranks, combined."""

    again: bool = False  # on some rank a gradient came after its group was sent
    mixed: bool = False  # some ranks were in a backward, and others at their step
    ill: bool = False  # some rank has NaN or inf


class Flags:
    """Sends and receives the flags of every exchange. `beside`: in a message of their own."""

    def __init__(self, comm: Communicator, *, beside: bool) -> None:
        self._comm, self._beside = comm, beside
        self._pending: Pending | None = None

    def send(self, label: str, *, again: bool, at_step: bool, ill: bool) -> Sequence[bool]:
        """Send the flags of this rank. Return those that the last group has to carry."""
        words = [again, not at_step, at_step, ill]
        if not self._beside:
            return words
        self._pending = self._comm.all_reduce_async(torch.tensor(words, dtype=torch.uint8), op="max", label=f"{label}, flags")
        return ()

    def receive(self, last: torch.Tensor) -> Said:
        """Return the flags of all ranks. `last` is the group that may have carried them."""
        answer = last[-FLAGS:] if self._pending is None else self._pending.wait()
        self._pending = None
        words = [word != 0 for word in answer.tolist()]
        return Said(words[SENT_AGAIN], words[IN_BACKWARD] and words[AT_STEP], words[NOT_FINITE])
