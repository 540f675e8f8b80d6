"""How far apart replicas are: the consensus distance of decentralised training, from a sample, with a small all-reduce.

    sqrt( mean over ranks of |w_i - w|**2 ) / |w|,    w the mean of all w_i

It is 0 for equal replicas. 0.01 means that a typical replica is 1 % of the length of the mean away from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from phalanx.comm.communicator import Communicator

SAMPLE = 65_536  # numbers, half a megabyte: the distance is then accurate to about 1 %, unless a few numbers dominate it


def spread(parameters: Sequence[torch.Tensor], comm: Communicator) -> float:
    """Return the distance for at most SAMPLE of the parameters, every k-th, the same on all ranks. All ranks call it."""
    mine = _sample(parameters)
    mean = comm.all_reduce(mine.clone(), op="mean")  # float32 as float64, so the mean is exact, and equal replicas give 0
    squares = torch.stack([((mine - mean) ** 2).sum(), (mean**2).sum()])
    distance, length = comm.all_reduce(squares, op="mean").tolist()
    return math.sqrt(distance / length) if length else 0.0


def _sample(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    total = sum(x.numel() for x in parameters)
    every = max(1, -(-total // SAMPLE))
    if every > 1 and every % 2 == 0:
        every += 1  # layers have even sizes, and an even stride would take the same column of each row
    taken, skip = [], 0
    for x in parameters:
        flat = x.detach().reshape(-1)
        taken.append(flat[skip::every])
        skip = (skip - flat.numel()) % every
    if not taken:
        return torch.zeros(0, dtype=torch.float64)
    home = taken[0].device
    return torch.cat([x.double().to(home) for x in taken]).cpu()  # one copy to the host instead of one per parameter
