"""How often a test repeats itself: seldom in `make test`, often in CI, which sets PHALANX_TEST_LONG=1. It asserts the same."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = os.environ.get("PHALANX_TEST_LONG") == "1"

# a test that takes seconds of what `make test` tries in another way, or on fewer ranks
only_long = pytest.mark.skipif(not LONG, reason="takes long: PHALANX_TEST_LONG=1 runs it, as CI does")


def often(*repetitions: T) -> tuple[T, ...]:
    """More cases of what `make test` has another case of: `cases(1, *often(2, 3))`. They are all there in CI, and none else."""
    return repetitions if LONG else ()


def times(often: int, *, seldom: int) -> int:
    """`often` in CI, else `seldom`."""
    return often if LONG else seldom
