"""What the ranks tell each other along with their gradients.

A rank writes 1 or 0, and what comes back is not 0 if any rank wrote 1:

    SENT_AGAIN              a gradient came after its group had left: all groups go again
    IN_BACKWARD, AT_STEP    both: some ranks have joined at their step, and wait for more backwards
    NOT_FINITE              a rank has NaN or inf in its own gradients

On the CPU they travel in the last elements of the last group. On a GPU they travel beside it, from host to host: to read them
from the group, the host would have to wait for the device. Beside a wire that rounds a 1 to 0, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending
from phalanx.grad.arena import FLAGS

SENT_AGAIN, IN_BACKWARD, AT_STEP, NOT_FINITE = range(-FLAGS, 0)


@dataclass(frozen=True, slots=True)
class Said:
    """What came back."""

    again: bool = False  # somewhere a gradient came after its group had left
    mixed: bool = False  # some ranks were in a backward, and others at their step
    ill: bool = False  # some rank has NaN or inf


class Flags:
    """The flags of one exchange after another. `beside`: they do not travel with the gradients."""

    def __init__(self, comm: Communicator, *, beside: bool) -> None:
        self._comm, self._beside = comm, beside
        self._pending: Pending | None = None

    def send(self, label: str, *, again: bool, at_step: bool, ill: bool) -> Sequence[bool]:
        """Say something; returns what the last group has to carry."""
        words = [again, not at_step, at_step, ill]
        if not self._beside:
            return words
        self._pending = self._comm.all_reduce_async(torch.tensor(words, dtype=torch.uint8), op="max", label=f"{label}, flags")
        return ()

    def receive(self, last: torch.Tensor) -> Said:
        """What the ranks said; `last` is the group that may have carried it."""
        answer = last[-FLAGS:] if self._pending is None else self._pending.wait()
        self._pending = None
        words = [word != 0 for word in answer.tolist()]
        return Said(words[SENT_AGAIN], words[IN_BACKWARD] and words[AT_STEP], words[NOT_FINITE])
