"""Double buffering, from ChainerMN 1.3: a step applies the means of the previous step, while its own are in flight.

The next forward and backward hide a slow network, at the price of one step of staleness. Differences: any backend, not only NCCL,
and a second buffer per group instead of a second model. As in ChainerMN, the first step has nothing to apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.grad.reducer import Group, GroupReducer


class Previous:
    """The means of the previous step: in flight, or restored from a checkpoint."""

    def __init__(self, reducer: GroupReducer) -> None:
        self._reducer = reducer
        self.ready = False  # whether what `swap` brought is a mean
        self.restored: dict[str, torch.Tensor] = {}  # means from before a checkpoint, by name; the next swap brings them

    def swap(self, groups: Sequence[Group], names: Mapping[torch.nn.Parameter, str], label: str) -> None:
        """Send this step's gradients, and put the previous step's means in their place."""
        self.ready = all(group.pending is not None for group in groups)
        for group in groups:
            group.arena.take_all(group.params)
            if group.pending is not None:
                self._reducer.arrive(group)
                previous = group.travels.clone()
                group.travels.copy_(group.flat)
                group.flat.copy_(previous)
            else:
                group.travels.copy_(group.flat)
        self._bring_restored(groups, names)
        self._reducer.weights.settle()
        for group in groups:
            self._reducer.leave(group, label)

    def _bring_restored(self, groups: Sequence[Group], names: Mapping[torch.nn.Parameter, str]) -> None:
        """Use restored means instead of the previous step's, which this process has not seen."""
        restored, self.restored = self.restored, {}
        if not self.ready and restored.keys() == {names[p] for group in groups for p in group.params}:
            for group in groups:
                for p in group.params:
                    group.arena.views[p].copy_(restored[names[p]])
            self.ready = True

    def means(self, groups: Sequence[Group], names: Mapping[torch.nn.Parameter, str]) -> dict[str, torch.Tensor]:
        """What the next swap brings, by name. Waits for it."""
        found: dict[str, torch.Tensor] = {}
        if groups and all(group.pending is not None for group in groups):
            for group in groups:
                self._reducer.land(group)
                found |= {names[p]: _beside(group.arena.views[p], group.flat, group.travels) for p in group.params}
        return found or self.restored


def _beside(view: torch.Tensor, flat: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The part of `other` at the place that `view` has in `flat`."""
    return other.as_strided(view.shape, view.stride(), other.storage_offset() + view.storage_offset() - flat.storage_offset())
