"""For all tests."""

from __future__ import annotations

import signal
import subprocess

import pytest
from tests.warm.popen import Python, warm

# A shell has what it starts in the background ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test starts by `[sys.executable, ...]` have torch and phalanx imported: tests/warm/popen.py."""
    warm()
    monkeypatch.setattr(subprocess, "Popen", Python)
