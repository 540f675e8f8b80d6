"""Notices gradients that the user changed while they were on their way to the other ranks: such a change is in no mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from phalanx._torch_private import version_of


class Print(NamedTuple):
    """A gradient as it was: which object, at which address, written to how often."""

    grad: torch.Tensor | None
    address: int
    version: int

    @staticmethod
    def of(grad: torch.Tensor | None) -> Print:
        return Print(None, 0, 0) if grad is None else Print(grad, grad.data_ptr(), version_of(grad))

    def matches(self, grad: torch.Tensor | None) -> bool:
        return grad is self.grad and (grad is None or (grad.data_ptr(), version_of(grad)) == self[1:])


class Untouched:
    """Gradients as they were when they were complete, or left."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.names: Mapping[torch.nn.Parameter, str] = {}  # for the error
        self._prints: dict[torch.nn.Parameter, Print] = {}

    def note(self, p: torch.nn.Parameter) -> None:
        """From now on its gradient must stay as it is."""
        self._prints[p] = Print.of(p.grad)

    def forget(self, keep: Iterable[torch.nn.Parameter] = ()) -> None:
        """Gradients may change again, but for those of `keep`."""
        self._prints = {p: self._prints[p] for p in keep if p in self._prints}

    def check(self, params: Iterable[torch.nn.Parameter], when: str, *, may_be_dropped: bool) -> None:
        """Raise if one was changed. With `may_be_dropped` a gradient that is None now is no change: it counts as zeros."""
        for p in params:
            before = self._prints.get(p)
            if before is None or before.matches(p.grad) or (may_be_dropped and p.grad is None):
                continue
            raise RuntimeError(
                f"rank {self._rank}: the gradient of {self.names.get(p, 'a parameter')} was changed {when}. Change gradients "
                "after backward() has returned, when they are the mean; before it has, only inside opt.no_sync()"
            )
