"""Shared memory within a host and torch.distributed between hosts: the rows and the columns of a torus.

A `Collective` by exactly the ranks of this host runs on the native core. Everything else goes to the transport below, as Moves on
gloo. The choice depends on the group alone, so all ranks of a group make the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.transports import Message, Transport
from phalanx.native.core import TYPES
from phalanx.native.team import HostTeam
from phalanx.schedule import Collective, Schedule


class SharedTransport:
    """`team` serves the ranks of this host, `host` in the transport's numbers, ascending. `below` serves all others."""

    def __init__(self, below: Transport, team: HostTeam, host: Sequence[int]) -> None:
        self.below, self.team, self.host = below, team, tuple(host)
        self.library = below.library

    @property
    def address(self) -> str:
        return self.below.address

    @property
    def device(self) -> torch.device | None:
        return self.below.device

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        return self.below.post(sends, receives, tag)

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        self.below.wait(posted, for_ever=for_ever)

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        self.below.prepare(schedule, ranks)

    @property
    def cold(self) -> bool:
        return self.below.cold

    def warm_up(self, x: torch.Tensor) -> None:
        self.below.warm_up(x)

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        return self._shares(call, x, ranks) or self.below.calls(call, x, ranks)

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        if not self._shares(call, x, ranks):
            self.below.collective(call, x, op, ranks)
        elif call.kind in ("all_reduce", "reduce"):  # a reduce leaves the other ranks undefined, so they may get the sum
            self.team.all_reduce(x, op)  # type: ignore[arg-type]
        elif call.kind == "reduce_scatter":
            self.team.reduce_scatter(x, op)  # type: ignore[arg-type]
        elif call.kind == "all_gather":
            self.team.all_gather(x)
        else:
            self.team.broadcast(x, 0)

    def can_carry(self, x: torch.Tensor) -> bool:
        return self.below.can_carry(x)

    def close(self) -> None:
        self.team.close()
        self.below.close()

    def _shares(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        return can_share(x) and tuple(ranks[r] for r in call.group) == self.host


def can_share(x: torch.Tensor) -> bool:
    """Whether the native core reduces tensors like `x`."""
    return x.is_cpu and x.dtype in TYPES
