"""One update of the weights, as the loader and the shuffle yield it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One update of the weights: this rank's micro-batches, whose gradients you accumulate.

    Args:
        epoch: The epoch, from 0.
        index: The number of the step in its epoch.
        batch: The samples of all ranks together.
        micro: One (x, y) per micro-batch.
        samples: The samples of this rank in all micro-batches.

    Example:
        >>> loader = phalanx.data.Loader((torch.zeros(8, 2), torch.arange(8)), batch=4, micro_batch=2)
        >>> [(step.index, len(step.micro), step.samples) for step in loader.steps()]
        [(0, 2, 4), (1, 2, 4)]
    """

    epoch: int
    index: int  # of the step in its epoch
    batch: int  # samples over all ranks
    micro: tuple[Any, ...]  # (x, y) each
    samples: int  # of this rank, in all micro-batches together
