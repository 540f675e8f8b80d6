"""What a GradScaler leaves to an optimizer that wraps another one: its scale, and whether a gradient overflowed.

Both are tensors on the device. A host that asks for the answer waits until the device has computed it, once per step. So on a GPU
it asks only if it must. A fused Adam divides and skips itself, and gradients can become zeros without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx._torch_private import foreach_div_, unscales_itself


class Unscaling:
    """What a GradScaler has left on `outer`, an optimizer around `inner`, for the step that runs now."""

    def __init__(self, outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
        self.found: Any = getattr(outer, "found_inf", None)
        self._scale: torch.Tensor | None = getattr(outer, "grad_scale", None)
        self._inner: Any = inner

    @property
    def on_device(self) -> bool:
        """Whether asking costs a wait."""
        return isinstance(self.found, torch.Tensor) and not self.found.is_cpu

    @property
    def is_inner(self) -> bool:
        """Whether the inner optimizer divides and skips itself, on a GPU."""
        return self.on_device and unscales_itself(self._inner)

    def divide(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide by the scale, if that was not done before."""
        if self._scale is not None and gradients:
            foreach_div_(list(gradients), self._scale.to(gradients[0].device))

    def zero_overflow(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make all of them zeros if one overflowed, without asking."""
        for gradient in gradients:
            gradient.masked_fill_((self.found != 0).to(gradient.device), 0.0)  # 0 * inf would be NaN

    def step_inner(self) -> Any:
        """Make a step of the inner optimizer, which gets the scale and the answer."""
        self._inner.grad_scale, self._inner.found_inf = self._scale, self.found
        try:
            return self._inner.step()
        finally:
            del self._inner.grad_scale, self._inner.found_inf

    def unscale(self, gradients: list[torch.Tensor], *, mixes: bool) -> bool:
        """Divide by the scale of a GradScaler. Return whether a gradient overflowed. `mixes`: gradients are exchanged next.

        On a GPU the host does not ask if gradients are exchanged: after an overflow they become zeros. Nor does it ask if a fused
        optimizer skips the update itself. With any other optimizer it waits once per step, as torch's own GradScaler does.
        """
        if self.found is None or (not mixes and self.is_inner):
            return False
        unasked = mixes and self.on_device
        overflowed = not unasked and bool(self.found)
        if not overflowed:
            self.divide(gradients)
        if unasked:
            self.zero_overflow(gradients)
        return overflowed
