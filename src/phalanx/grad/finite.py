"""Checks in every exchange whether gradients are finite. The answer is known at once on the CPU, and a few steps later on a GPU.

On a GPU the host would have to wait for the device in every step to know at once. So the answer stays on the device until an
asynchronous copy of it has reached pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.streams import HostCopy
from phalanx.grad.reducer import Group

SAMPLE = 1024  # gradients in which a rank looks for NaN
NEVER = 1 << 62


class DeviceFlags:
    """`count` boolean flags on one GPU, which the host reads without waiting."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._flags = torch.zeros(count, dtype=torch.bool, device=device)
        self._seen = torch.zeros(count, dtype=torch.bool, pin_memory=True)
        self._copy: HostCopy | None = None  # in `_seen`

    def raise_if(self, number: int, condition: torch.Tensor) -> None:
        """Set a flag if the condition, a boolean on the device, holds."""
        self._flags[number].logical_or_(condition)

    def look(self) -> list[int]:
        """Return the flags known to be set, each once, and start to fetch new ones."""
        if self._copy is not None and not self._copy.arrived:
            return []
        raised = [] if self._copy is None else [i for i, flag in enumerate(self._copy.tolist()) if flag]
        self._copy = HostCopy(self._flags, into=self._seen)
        self._flags.zero_()  # after the copy, in the order of the stream
        return raised


class Finite:
    """Knows which means of `groups` overflowed on a 16-bit wire, and whether this rank's own gradients are finite."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)
        self._number = {id(group): i for i, group in enumerate(groups)}
        self._mine = len(self._groups)  # the flag after those of the groups
        self._asked = 0  # exchanges so far
        self._since: torch.Tensor | int = NEVER  # the first exchange in which this rank's own gradients were not finite
        devices = dict.fromkeys(group.flat.device for group in groups if group.flat.is_cuda)
        self._later = {device: DeviceFlags(len(self._groups) + 1, device) for device in devices}

    def look(self, last: Group) -> bool:
        """Whether a sample of this rank's gradients is not finite, as far as is known. Called once per exchange."""
        finite = torch.isfinite(last.flat[:SAMPLE]).all()
        self._asked += 1
        if not last.flat.is_cuda:
            if not bool(finite):
                self._since = min(int(self._since), self._asked)
            return not bool(finite)
        self._since = torch.where(finite, NEVER, self._asked).clamp(max=self._since)
        self._later[last.flat.device].raise_if(self._mine, ~finite)
        return self.look_at_devices()

    def ago(self) -> int | None:
        """How many exchanges ago this rank's own gradients were not finite for the first time. Waits for the device."""
        since = int(self._since)
        return None if since == NEVER else self._asked - since

    def look_at_devices(self) -> bool:
        """Mark groups whose overflow has become known; whether this rank's own gradients are known not to be finite."""
        raised = {number for flags in self._later.values() for number in flags.look()}
        for number in raised - {self._mine}:
            self._groups[number].overflowed = True
        return self._mine in raised

    def came_back(self, group: Group, finite: torch.Tensor) -> None:
        """The mean of `group` came back as 16 bits; `finite` is on the device of the group."""
        if finite.is_cuda:
            self._later[finite.device].raise_if(self._number[id(group)], ~finite)
        elif not bool(finite):
            group.overflowed = True
