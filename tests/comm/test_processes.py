"""What the kernel says of a process: alive, stopped, ending or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from phalanx.comm.processes import EXITING, look_up


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate(timeout=10)


def test_a_live_process_is_itself(child: subprocess.Popen[bytes]) -> None:
    found = look_up(child.pid)
    assert found
    assert not found.dead
    assert found.parent == os.getpid()


def test_a_stopped_process_is_not_dead(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    found = look_up(child.pid)
    assert found
    assert (found.state, found.dead) == ("T", False)


def test_the_flag_of_an_end_is_set_before_its_state_says_so_and_stays(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    found = look_up(child.pid)
    assert found
    assert found.state == "Z"
    assert found.flags & EXITING
    assert found._replace(state="R").dead  # what the others see while connections are being closed
    child.wait(timeout=10)
    assert look_up(child.pid) is None
