"""Shared memory that a communicator lends out, and takes back when no rank uses it any more.

Releasing shared memory is collective, but each rank drops its tensors when it likes, and the garbage collector may do it. So
nothing happens when a tensor is dropped. Whenever the ranks ask for new memory, which they do together, they first compare which
of the old buffers are in use, and release those that no rank has any more. If you make one optimizer after the other you need the
memory of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx._torch_private import other_views
from phalanx.native.team import HostTeam


class SharedBuffers:
    """The buffers of a team that are in use, in the order in which all its ranks asked for them."""

    def __init__(self, team: HostTeam) -> None:
        self._team = team
        self._lent: list[tuple[torch.Tensor, int]] = []  # and its address

    def lend(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Release what is unused, then lend what `allocate` returns; all ranks of the team call it together."""
        self._take_back()
        x = allocate()
        self._lent.append((x, x.data_ptr()))
        return x.view(torch.uint8)  # not the tensor that is kept here, so that views can be counted

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
    """Whether there is no other view of it; False where this torch does not know.

    `share_memory()` on a model with gradients moves them to memory that the team does not know. Such a buffer is kept.
    """
    return x.data_ptr() == address and other_views(x) == 0
