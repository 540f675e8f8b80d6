"""Which parameters are sent together: parts of about equal size, in the order of the parameters."""

from __future__ import annotations

from collections.abc import Sequence


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """The numbers of the parameters of each part. The largest part is as small as whole parameters in this order allow."""
    if parts > len(sizes):
        raise ValueError(f"fragments={parts}, but there are only {len(sizes)} parameters to cut: use at most that many")
    low, high = max(sizes), sum(sizes)
    while low < high:  # the least size that is enough, by bisection
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle, parts)) <= parts else (middle + 1, high)
    return _filled(sizes, low, parts)


def _filled(sizes: Sequence[int], most: int, parts: int) -> list[range]:
    """Parts of at most `most` in size. At least `parts` of them: if fewer were enough, the last ones are smaller."""
    found: list[range] = []
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        left = len(sizes) - i  # parameters still to come; each may have to be its own part
        if i > begin and (held + size > most or left <= parts - len(found) - 1):
            found.append(range(begin, i))
            begin, held = i, 0
        held += size
    return [*found, range(begin, len(sizes))]
