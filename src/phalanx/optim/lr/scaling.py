"""Scale rates and momentum with the batch."""

from __future__ import annotations

import math


def linear_scaling(batch: float, *, rate: float = 0.1, reference: float = 256) -> float:
    """The peak rate for a batch, proportional to its size (Goyal et al. 2017).

    Args:
        batch: The samples of one update.
        rate: The rate that is right for `reference`.
        reference: The batch that `rate` is right for.

    Returns:
        rate * batch / reference.

    Example:
        >>> phalanx.lr.linear_scaling(8192)
        3.2
    """
    return rate * batch / reference


def sqrt_scaling(batch: float, *, rate: float = 0.1, reference: float = 256) -> float:
    """The peak rate that grows with the square root of the batch, to keep the variance of a step (Krizhevsky, arXiv 1404.5997).

    Args:
        batch: The samples of one update.
        rate: The rate that is right for `reference`.
        reference: The batch that `rate` is right for.

    Returns:
        rate * sqrt(batch / reference).

    Example:
        >>> phalanx.lr.sqrt_scaling(1024)
        0.2
    """
    return rate * math.sqrt(batch / reference)


def momentum_for(batch: float, *, momentum: float = 0.9, reference: float, rate_factor: float = 1.0) -> float:
    """The momentum that keeps the noise of SGD when the batch changes (Smith et al., arXiv 1711.00489).

    The noise scale rate * N / (batch * (1 - momentum)) stays the same.

    Args:
        batch: The new batch.
        momentum: The momentum that is right for `reference`.
        reference: The old batch.
        rate_factor: The factor by which the rate changes.

    Returns:
        The new momentum.

    Raises:
        ValueError: If no momentum keeps the noise. The message names a rate factor that does.

    Example:
        >>> phalanx.lr.momentum_for(512, momentum=0.9, reference=256)
        0.95
    """
    found = 1.0 - (1.0 - momentum) * rate_factor * reference / batch
    if not 0 <= found < 1:
        raise ValueError(
            f"momentum_for({batch}, momentum={momentum}, reference={reference}, rate_factor={rate_factor}) is {found:.3g}: "
            f"no momentum keeps the noise; change the rate by {batch / reference:.3g} as well"
        )
    return found
