"""For all tests."""

from __future__ import annotations

import signal

# A shell has what it starts in the background ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
