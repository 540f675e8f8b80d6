"""Static groups: which gradients are sent together. They follow from the first backward, and all ranks agree on them once.

Fujitsu (Yamazaki et al., arXiv 1903.12650) gathers gradients into payloads of several MB, grouped statically from the back of the
network, so that no rank has to ask at run time whether the others are ready. `even` fills groups up to a size. `growing` is the
rule of their MLPerf code, whose k-th boundary is after first * k**3 tensors: the first group is sent almost at once, and the last
groups, which nothing can hide, are large and few.

Difference from the paper: their groups follow the order of the layers, ours the order in which gradients were computed.
"""

from __future__ import annotations

from collections.abc import Sequence


def even(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Return runs of consecutive tensors of at most `limit` bytes each. A larger tensor is a group of its own."""
    groups, start, filled = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > limit:
            groups.append(range(start, i))
            start, filled = i, 0
        filled += size
    if start < len(sizes):
        groups.append(range(start, len(sizes)))
    return tuple(groups)


def growing(count: int, first: int) -> tuple[range, ...]:
    """Return runs of tensors whose k-th boundary is at first * k**3: 3 | 21 | 57 | 80 of ResNet-50's 161 for first = 3."""
    if first < 1:
        raise ValueError(f"growing={first}: the first group has at least 1 tensor")
    groups, start, k = [], 0, 1
    while start < count:
        stop = min(count, first * k**3)
        groups.append(range(start, stop))
        start, k = stop, k + 1
    return tuple(groups)
