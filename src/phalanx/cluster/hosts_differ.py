"""Hosts are not equally fast, and a synchronous step waits for the slowest: what that is to be expected to cost."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .machine import Cluster

Floats = NDArray[np.float64]

# Relative standard deviation between hosts of equal hardware: the mean scatter of single-node results of one accelerator, number
# of them, batch and round of MLPerf Training (ResNet-50, v0.5 to v3.0; benchmarks/plan_rows.py computes it).
HOST_SPREAD = 0.019


def typical_slowness(cluster: Cluster, sigma: float) -> Floats:
    """By rank, the factor on computing time where hosts are normally distributed: the expected order statistics (Blom 1958).

    The reference is a host as good as the mean; one host alone is exactly that.
    """
    if sigma < 0:
        raise ValueError(f"hosts that differ by {sigma}; give at least 0")
    count = cluster.hosts
    places = (np.arange(1, count + 1) - 0.375) / (count + 0.25)
    scores = np.array([NormalDist().inv_cdf(float(place)) for place in places])
    return np.repeat(1 + sigma * scores, cluster.per_host)
