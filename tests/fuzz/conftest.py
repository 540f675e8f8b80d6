"""Files of the fuzzers lie in memory: thousands are written, and none matters."""

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def memory():
    """A directory that is fast."""
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        yield Path(path)
