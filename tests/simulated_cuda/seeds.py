"""How many interleavings a test tries: few in `make test`, PHALANX_TEST_SEEDS=1000 of each in CI."""

from __future__ import annotations

import os

EACH = int(os.environ.get("PHALANX_TEST_SEEDS", "0"))


def seeds(usual: int) -> range:
    """`usual` of them, or as many as were asked for."""
    return range(EACH or usual)
