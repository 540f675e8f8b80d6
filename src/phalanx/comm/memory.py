"""Buffers in the memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from phalanx.comm.operations import Operations
from phalanx.comm.shared_buffers import SharedBuffers
from phalanx.native.core import TYPES
from phalanx.native.errors import Refused
from phalanx.native.team import HostTeam

T = TypeVar("T")


class Memory:
    """Buffers of one communicator. `shared`: the ranks of every host share memory."""

    def __init__(self, operations: Operations, *, shared: bool) -> None:
        self._operations, self._shared = operations, shared
        self._buffers = SharedBuffers(operations.team) if operations.team is not None else None

    @property
    def is_shared_by_all(self) -> bool:
        return self._operations.team_of_all is not None

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        if not self._shared or numel == 0 or dtype not in TYPES or torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes, team, buffers = numel * dtype.itemsize, self._operations.team, self._buffers

        def work(tag: int) -> torch.Tensor:
            if team is None or buffers is None:  # alone on its host; still an operation, because all ranks must count it
                return torch.empty(numel, dtype=dtype)
            try:
                return buffers.lend(lambda: team.allocate(nbytes)).view(dtype)
            except Refused:  # on all ranks of the host, most likely because of their memory limit
                return torch.empty(numel, dtype=dtype)

        return self._operations.start(f"buffer({nbytes} bytes)", work).wait()

    def shared_buffer(self, numel: int) -> torch.Tensor:
        team = self._shared_by_all("shared_buffer")
        buffers = self._buffers
        assert buffers is not None
        work = lambda tag: buffers.lend(lambda: team.allocate_one_for_all(numel * 4)).view(torch.float32)  # noqa: E731
        return self._operations.start(f"shared_buffer({numel})", work).wait()

    def on_host(self, name: str, work: Callable[[HostTeam], T]) -> T:
        team = self._shared_by_all(name)
        return self._operations.start(name, lambda tag: work(team)).wait()

    def _shared_by_all(self, verb: str) -> HostTeam:
        team = self._operations.team_of_all
        if team is None:
            raise RuntimeError(f"{verb}: the ranks of this communicator do not all share memory (see comm.shares_memory)")
        return team
