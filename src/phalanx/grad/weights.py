"""How much the gradients of each rank count in the mean: all the same, or by the samples in each rank's batch.

The sum of all weights is known only when the gradients have arrived. So they are first divided by the sum of the previous step,
which keeps a 16-bit sum small, and corrected when they arrive. The weights travel in a message of their own, or in an element
beside the gradients if all of these are one message of 32 or 64 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.pending import Pending


class Weights:
    """The weight of this rank, `mine`, and the sum of the weights of all ranks. Without `by_samples` it has no effect."""

    def __init__(self, comm: Communicator, *, by_samples: bool) -> None:
        self._comm, self.by_samples = comm, by_samples
        self.mine: float = 1.0
        self._total: tuple[torch.Tensor, Pending | None] | None = None  # the sum of this step's weights; Pending: in flight
        self._along: int | None = None  # the element beside the gradients in which they travel
        self._usual: torch.Tensor | None = None  # the sum of an earlier step's weights

    @property
    def counts(self) -> bool:
        """Whether the gradients of this rank are in the mean."""
        return not self.by_samples or self.mine > 0

    def weigh(self, x: torch.Tensor, *, along: int | None = None) -> None:
        """Multiply by this rank's share of the samples, as far as it is known: a 16-bit sum of gradient * samples overflows.

        `along`: the element of `x` that may carry the weight, if `x` is all that is sent.
        """
        self._along = along if self._usual is not None and x.dtype in (torch.float32, torch.float64) else None
        if self._total is None and self._along is None:
            total = torch.full((), self.mine, dtype=torch.float64, device=x.device)  # a fill: a copy would make the host wait
            self._total = total, self._comm.all_reduce_async(total)
        if self._usual is None:
            self._usual = _positive(self._arrived())
        if self.mine:
            x.mul_((self.mine / self._usual).to(x.device))
        else:
            x.zero_()  # the mean over an empty batch is NaN, and so is 0 * NaN
        if self._along is not None:
            x[self._along] = self.mine

    def correct(self, x: torch.Tensor) -> None:
        """Turn a sum of weighted gradients into the mean. Its share was a guess from the previous step."""
        if self._along is not None:
            self._total, self._along = (x[self._along].to(torch.float64, copy=True), None), None
        if self._total is not None and self._usual is not None:
            x.mul_((self._usual / _positive(self._arrived())).to(x.device))

    def _arrived(self) -> torch.Tensor:
        assert self._total is not None
        total, pending = self._total
        if pending is not None:
            pending.wait()
        return total

    def settle(self) -> None:
        """End the step. Its sum of weights is the guess for the next one."""
        if self._total is not None:
            self._usual, self._total = _positive(self._total[0]), None

    def forget(self, usual: float | None) -> None:
        """Prepare to repeat a step that broke, with the sum of weights that it started with."""
        self._total, self._along, self.usual = None, None, usual

    @property
    def usual(self) -> float | None:
        """The sum of weights by which the next step's weights are divided first. It affects how the mean is rounded."""
        known = self._total[0] if self._total is not None else self._usual
        return None if known is None else float(_positive(known))

    @usual.setter
    def usual(self, total: float | None) -> None:
        self._usual = None if total is None else torch.tensor(total, dtype=torch.float64)

    def mean(self, loss: Any) -> Any:
        """Return the mean of a loss, a number or a one-element tensor, weighted like the gradients. All ranks call it."""
        if not isinstance(loss, float | int | torch.Tensor):
            return loss
        device = loss.device if isinstance(loss, torch.Tensor) else torch.device("cpu")
        pair = torch.ones(2, dtype=torch.float64, device=device)
        pair[0] = loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss
        weight = self.mine if self.by_samples else 1.0
        pair = pair * weight if weight else torch.zeros_like(pair)
        total, weights = self._comm.all_reduce(pair)
        mean = total / _positive(weights)
        return mean.to(loss) if isinstance(loss, torch.Tensor) else float(mean)


def _positive(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))
