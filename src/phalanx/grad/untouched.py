"""Detects gradients that the user changed while they were in flight. No mean would contain such a change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from phalanx._torch_private import version_of


class Print(NamedTuple):
    """A gradient at one moment: the object, its address, and how often it was written."""

    grad: torch.Tensor | None
    address: int
    version: int

    @staticmethod
    def of(grad: torch.Tensor | None) -> Print:
        return Print(None, 0, 0) if grad is None else Print(grad, grad.data_ptr(), version_of(grad))

    def matches(self, grad: torch.Tensor | None) -> bool:
        return grad is self.grad and (grad is None or (grad.data_ptr(), version_of(grad)) == self[1:])


class Untouched:
    """Remembers gradients as they were when they became complete or were sent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.names: Mapping[torch.nn.Parameter, str] = {}  # for the error
        self._prints: dict[torch.nn.Parameter, Print] = {}

    def note(self, p: torch.nn.Parameter) -> None:
        """From now on the gradient of `p` must not change."""
        self._prints[p] = Print.of(p.grad)

    def forget(self, keep: Iterable[torch.nn.Parameter] = ()) -> None:
        """Allow changes again, except to the gradients of `keep`."""
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
