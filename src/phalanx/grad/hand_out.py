"""The end of a gradient's way: the mean in the arena becomes `p.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.grad.reducer import Group


class HandOut:
    """Gives means to parameters. A gradient with a graph keeps it: its value becomes the mean, its derivative stays its own."""

    def __init__(self) -> None:
        self._graphs: dict[torch.nn.Parameter, tuple[torch.Tensor, Group]] = {}

    def give(self, groups: Sequence[Group]) -> None:
        """Make the means of these groups the gradients of their parameters."""
        self._graphs.clear()
        for group in groups:
            for p in group.params:
                grad = p.grad
                if not p.requires_grad:
                    continue
                if grad is not None and grad.requires_grad:
                    p.grad = grad + (group.arena.views[p] - grad.detach())
                    self._graphs[p] = p.grad, group
                else:
                    group.arena.give(p)

    def drop_graphs(self) -> None:
        """Before an update: replace a gradient with a graph, which is only about the mean, by the exact mean."""
        for p, (grad, group) in self._graphs.items():
            if p.grad is grad:
                group.arena.give(p)
        self._graphs.clear()
