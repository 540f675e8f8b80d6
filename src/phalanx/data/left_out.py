"""Record the damaged samples that a rank skipped: their number, the last names, and one warning per epoch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence

from phalanx.schedule.printable import one_line

REMEMBERED = 1000  # names; their number is always exact


class LeftOut:
    """The record of one loader."""

    def __init__(self) -> None:
        self._last: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
        self.count = 0
        self._warned_in: int | None = None  # an epoch

    @property
    def last(self) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the most recent ones."""
        return tuple(self._last)

    def note(self, epoch: int, skipped: Sequence[tuple[str, str]], stacklevel: int) -> None:
        """Record those of a micro-batch of `epoch`, and warn once per epoch."""
        self._last.extend(skipped)
        self.count += len(skipped)
        if skipped and self._warned_in != epoch:
            self._warned_in = epoch
            name, reason = skipped[0]
            message = one_line(f"epoch {epoch}: left out {name}: {reason} (`skipped` will have more)")
            warnings.warn(message, stacklevel=stacklevel + 1)
