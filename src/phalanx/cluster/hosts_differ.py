"""The expected cost of hosts that are not equally fast: a synchronous step waits for the slowest."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .machine import Cluster

Floats = NDArray[np.float64]

# Relative standard deviation between hosts of equal hardware: the mean scatter of single-node results with the same accelerator,
# count, batch and round of MLPerf Training (ResNet-50, v0.5 to v3.0; benchmarks/plan_rows.py computes it).
HOST_SPREAD = 0.019


def typical_slowness(cluster: Cluster, sigma: float) -> Floats:
    """The factor on each rank's computing time if hosts are normally distributed: the expected order statistics (Blom 1958).

    A host of mean speed has the factor 1. A single host is exactly that.
    """
    if sigma < 0:
        raise ValueError(f"hosts that differ by {sigma}; give at least 0")
    count = cluster.hosts
    places = (np.arange(1, count + 1) - 0.375) / (count + 0.25)
    scores = np.array([NormalDist().inv_cdf(float(place)) for place in places])
    return np.repeat(1 + sigma * scores, cluster.per_host)
