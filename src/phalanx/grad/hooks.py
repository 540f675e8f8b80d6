"""Autograd hooks on parameters: one runs before a gradient is accumulated, one when it is complete for this backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

# All Hooks of each parameter. Only one of them may send during backward, because the others read the same gradient.
_watchers: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Hooks:
    """Calls the methods `before(id(p))` and `after(p)` for every hooked parameter, while their objects are alive."""

    def __init__(self, before: Callable[[int], None] | None, after: Callable[[torch.nn.Parameter], None]) -> None:
        # Weak references: a parameter outlives its optimizer and must not keep it alive.
        self._before, self._after = before and weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._hooks: dict[torch.nn.Parameter, list[Any]] = {}
        self._handles: list[Any] = []
        self.alone = True  # no other optimizer hooks these parameters
        # Parameters that a newer optimizer hooks or has hooked: garbage is collected at different times on different ranks.
        self.superseded: set[torch.nn.Parameter] = set()
        weakref.finalize(self, _remove, self._handles)

    def on(self, params: Sequence[torch.nn.Parameter], *, among: Sequence[torch.nn.Parameter]) -> None:
        """Hook `params` too, and remove the hooks of all parameters that are not in `among`."""
        for p in self._hooks.keys() - set(among):
            _remove(self._hooks.pop(p))
            _watchers[p].discard(self)
            self.superseded.discard(p)
        for p in params:
            if not p.is_leaf:  # differentiable optimizers have these, and the user sets their gradients
                continue
            if p not in self._hooks:
                before = [p.register_hook(_calling_before(self._before, id(p)))] if self._before else []
                self._hooks[p] = [*before, p.register_post_accumulate_grad_hook(_calling_after(self._after))]
                self._handles.extend(self._hooks[p])
                self._supersede_others(p)

    def _supersede_others(self, p: torch.nn.Parameter) -> None:
        watchers = _watchers.setdefault(p, weakref.WeakSet())
        for other in list(watchers):
            self.alone = other.alone = False
            other.superseded.add(p)
        watchers.add(self)

    def look_for_others(self) -> None:
        """Check whether other optimizers that hooked these parameters still exist."""
        self.alone = self.alone or all(len(_watchers[p]) == 1 for p in self._hooks)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _calling_before(method: Any, key: int) -> Callable[[torch.Tensor], None]:
    def before(_: torch.Tensor) -> None:
        call = method()
        if call is not None:
            call(key)

    return before


def _calling_after(method: Any) -> Callable[[Any], None]:
    def after(p: Any) -> None:
        call = method()
        if call is not None:
            call(p)

    return after
