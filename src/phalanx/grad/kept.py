"""This rank's own gradients, kept until their mean counts, so that an exchange that broke can be done again.

Autograd makes a fresh gradient in every backward, and the arena copies it into its place. So keeping it only costs memory: the
fresh one is not freed until the exchange is over. A gradient that was accumulated in the arena itself is copied before it is
sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from phalanx.grad.arena import Arena
from phalanx.grad.untouched import Print


class Kept:
    """Gradients that are complete, and those that were sent with their groups."""

    def __init__(self) -> None:
        self._came: dict[torch.nn.Parameter, tuple[torch.Tensor, Print | None]] = {}
        self._left: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self.whole = True  # nothing was added to a gradient after it was sent

    def came(self, p: torch.nn.Parameter, arena: Arena | None) -> None:
        """Its gradient is complete, and about to be copied into the arena."""
        self.whole = self.whole and p not in self._left
        grad = p.grad
        if grad is None or (arena is not None and arena.has(p, grad)):
            self._came.pop(p, None)  # it is in the arena, so `leaves` copies it
        else:
            self._came[p] = (grad, None)

    def settled(self, p: torch.nn.Parameter) -> None:
        """It is in the arena now. If you change it there, the fresh one is not what is sent."""
        if p in self._came:
            self._came[p] = (self._came[p][0], Print.of(p.grad))

    def leaves(self, params: Iterable[torch.nn.Parameter], arena: Arena) -> None:
        """These are about to be sent."""
        for p in params:
            if p in self._left:
                continue  # it is sent again: only what was sent first counts
            if p.grad is None or not p.requires_grad:
                self._left[p] = None
                continue
            own, seen = self._came.get(p, (None, None))
            if own is None or (seen is not None and not seen.matches(p.grad)):
                own = arena.views[p].clone()
            self._left[p] = own

    def restore(self) -> None:
        """Give all parameters whose gradients were sent their own gradients back."""
        if not self.whole:
            raise RuntimeError(
                "a rank died during a backward that delivered a gradient in several pieces, after some were sent: this step "
                "cannot be repeated. Create the optimizer with sync=phalanx.AllReduce(overlap=False)"
            )
        for p, own in self._left.items():
            if p.requires_grad:
                p.grad = own
        self.clear()

    def clear(self) -> None:
        """Their means count, so free what was kept."""
        self._came.clear()
        self._left.clear()
        self.whole = True
