"""Ports that messages share fairly: each of n messages at a port gets 1/n of its rate, as with TCP and InfiniBand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TICK = 1e-12  # s; messages closer together than this arrive at once


def fair_ends(come: Floats, work: Floats, most: float) -> Floats:
    """When messages have passed their ports, one column per port. They arrive at `come`; alone, each would take `work` seconds.

    `most` is the share of a port's rate that one message can use: an uplink is faster than the cards of its hosts. Cells without
    a message have infinity in `come`. All ports advance together, each from one of its events to the next.
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
        # never below zero: a negative rest, from rounding, would never be done
        left = np.where(active, np.maximum(left - (now - before) * pace, 0.0), left)
        begun |= come <= now
