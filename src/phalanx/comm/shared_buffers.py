"""Shared memory that a communicator lends out and takes back when no rank uses it any more.

Releasing shared memory is collective, but each rank drops its tensors at its own time, or its garbage collector does. So nothing
happens when a tensor is dropped. Whenever the ranks allocate new memory, which they do together, they first compare which old
buffers are in use, and release those that no rank uses. If you create one optimizer after another, you need the memory of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx._torch_private import other_views
from phalanx.native.team import HostTeam


class SharedBuffers:
    """The buffers of a team that are in use, in the order in which all its ranks requested them."""

    def __init__(self, team: HostTeam) -> None:
        self._team = team
        self._lent: list[tuple[torch.Tensor, int]] = []  # with its address

    def lend(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Release unused buffers, then lend what `allocate` returns. All ranks of the team call it together."""
        self._take_back()
        x = allocate()
        self._lent.append((x, x.data_ptr()))
        return x.view(torch.uint8)  # not the tensor kept here, so that we can count views

    def _take_back(self) -> None:
        if not self._lent:
            return
        unused = torch.tensor([_is_unused(*buffer) for buffer in self._lent], dtype=torch.uint8)
        self._team.all_reduce(unused, "min")
        lent, self._lent = self._lent, []
        for buffer, everywhere in zip(lent, unused.tolist()):
            if everywhere:
                self._team.release(buffer[0])
            else:
                self._lent.append(buffer)


def _is_unused(x: torch.Tensor, address: int) -> bool:
    """Whether no other view of `x` exists. False if this version of torch cannot tell.

    `share_memory()` on a model with gradients moves them to memory outside the team. Such a buffer is kept.
    """
    return x.data_ptr() == address and other_views(x) == 0
