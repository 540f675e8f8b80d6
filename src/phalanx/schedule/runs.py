"""A set of ranks as ranges of consecutive ranks."""

from __future__ import annotations

from collections.abc import Iterable


def runs(numbers: Iterable[int]) -> list[range]:
    """`[0, 1, 2, 5]` as `[range(0, 3), range(5, 6)]`."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
