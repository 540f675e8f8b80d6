"""Ports that messages share fairly: each of n messages at a port has an n-th of its rate, as TCP and InfiniBand divide it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TICK = 1e-12  # s; messages that come closer together come at once


def fair_ends(come: Floats, work: Floats, most: float) -> Floats:
    """When messages have passed their ports, a column per port: they `come` then, and alone would take `work` seconds each.

    `most` is the part of a port's rate that one message can use: an uplink is faster than the cards of its hosts. Cells without a
    message come at infinity. All ports advance together, each from one of its events to the next.
    """
    ends, left = np.full(come.shape, np.inf), work.copy()
    now = come.min(axis=0)
    begun = come <= now
    while True:
        active = begun & np.isinf(ends)
        pace = np.minimum(most, 1.0 / np.maximum(active.sum(axis=0), 1))  # of each message
        least = np.where(active, left, np.inf).min(axis=0)
        finish, coming = now + least / pace, np.where(begun, np.inf, come).min(axis=0)
        after = np.minimum(finish, coming)
        if not np.isfinite(after).any():
            return ends
        ends = np.where(active & (left <= least * (1 + 1e-9)) & (finish <= coming), after, ends)
        now, before = np.where(np.isfinite(after), after, now), now
        left = np.where(active, left - (now - before) * pace, left)
        begun |= come <= now
