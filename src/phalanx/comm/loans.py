"""Shared memory that a communicator has given out, and takes back when nobody uses it any more.

To give memory back is collective, but ranks drop their tensors when they like, and a garbage collector drops them for them. So
nothing happens when a tensor is dropped. Whenever the ranks ask for new memory, which they do together, they first compare which
of the old buffers are in use, and release those that no rank has any more. Who makes one optimizer after the other thus needs the
memory of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.comm.storage import other_views
from phalanx.native.team import HostTeam


class Loans:
    """The buffers of a team that are in use, in the order in which all its ranks asked for them."""

    def __init__(self, team: HostTeam) -> None:
        self._team = team
        self._given: list[tuple[torch.Tensor, int]] = []  # and its address

    def give(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `allocate` returns, after what is unused was released; all ranks of the team call it together."""
        self._take_back()
        x = allocate()
        self._given.append((x, x.data_ptr()))
        return x.view(torch.uint8)  # another tensor than the one that is kept here

    def _take_back(self) -> None:
        if not self._given:
            return
        unused = torch.tensor([_is_unused(*loan) for loan in self._given], dtype=torch.uint8)
        self._team.all_reduce(unused, "min")
        given, self._given = self._given, []
        for loan, everywhere in zip(given, unused.tolist()):
            if everywhere:
                self._team.release(loan[0])
            else:
                self._given.append(loan)


def _is_unused(x: torch.Tensor, address: int) -> bool:
    """Whether nobody else has a view of it. Where this torch cannot tell, somebody has.

    What `share_memory()` of a model with gradients has put elsewhere, the team does not know any more: it is kept.
    """
    return x.data_ptr() == address and other_views(x) == 0
