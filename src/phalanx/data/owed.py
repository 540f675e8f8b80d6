"""Samples that a rank took but died before training: they come first in the next step. Arithmetic on ranges.

A step takes the next places of its epoch's order. If a rank dies in a step and the others finish it without that rank, its share
of the places is *owed*. The position moves back by that many places, which now stand for the owed ones:

    places of the order        0 1 2 3 4 5 6 7 | 8 9 ...
    a step on 4 ranks          a a b b c c d d |                  rank c dies: 4 and 5 are owed
    the position               Position(samples=6, owed=((4, 6),))
    the next step on 3 ranks               4 5 | 8 9 ...          the places 6 and 7 stand for 4 and 5

So the position still counts the samples that were trained, and every sample of an epoch is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ranges = tuple[tuple[int, int], ...]  # (first, behind the last) of runs of places


def count(ranges: Ranges) -> int:
    """The number of places."""
    return sum(last - first for first, last in ranges)


def after(ranges: Ranges, taken: int) -> Ranges:
    """What is left when the first `taken` places are used."""
    rest = []
    for first, last in ranges:
        skipped = min(taken, last - first)
        taken -= skipped
        if first + skipped < last:
            rest.append((first + skipped, last))
    return tuple(rest)


def until(ranges: Ranges, taken: int) -> Ranges:
    """The first `taken` places."""
    head = []
    for first, last in ranges:
        own = min(taken, last - first)
        taken -= own
        if own:
            head.append((first, first + own))
    return tuple(head)


def stands_for(places: range, start: int, owed: Ranges) -> Ranges:
    """The places of the order that `places` stand for, if those from `start` on stand for what is owed."""
    if not places:
        return ()
    moved = range(max(places.start, start), max(min(places.stop, start + count(owed)), max(places.start, start)))
    found = until(after(owed, moved.start - start), len(moved))
    before = (places.start, min(places.stop, start))
    behind = (max(places.start, start + count(owed)), places.stop)
    return tuple(run for run in (before, *found, behind) if run[0] < run[1])


def within(ranges: Ranges, n: int) -> Ranges:
    """Wrap places of a padded batch, which run beyond an epoch's `n` samples, to the beginning."""
    folded = []
    for first, last in ranges:
        while first < last:
            lap = first // n * n
            end = min(last, lap + n)
            folded.append((first - lap, end - lap))
            first = end
    return tuple(folded)


def listed(ranges: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """All places as one array."""
    runs = [np.arange(first, last, dtype=np.int64) for first, last in ranges]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)
