"""How often a test repeats itself: seldom in `make test`, often in CI, which sets PHALANX_TEST_LONG=1. It asserts the same."""

from __future__ import annotations

import os

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"


def times(often: int, *, seldom: int) -> int:
    """`often` in CI, else `seldom`."""
    return often if LONG else seldom
