"""A program that is forked warm finds itself, and ends, as one that is started: they differ in what is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.warm.popen import Python, warm

DEADLINE = 60.0
FACTS = """
import json, os, signal, sys
print(json.dumps({
    "parent": os.getppid(),
    "words": sys.argv,
    "name": __name__,
    "path": sys.path[0],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "input": sys.stdin.read(),
    "leads a session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpgid(os.getppid()),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32) if number != signal.SIGUSR1],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "mask": os.umask(0o22),
    "threads": len(os.listdir("/proc/self/task")),
    "encoding": [sys.stdout.encoding, sys.stderr.errors],
    "torch": "torch" in sys.modules,
}))
"""


def both(command: list[str], **options: object) -> list[subprocess.CompletedProcess]:
    """How it ends as a process that is started, and as one that is forked."""
    warm()
    ends = []
    for kind in (subprocess.Popen, Python):
        with kind(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
            try:
                out, err = process.communicate("a line\n" if options.get("stdin") == subprocess.PIPE else None, timeout=DEADLINE)
            finally:
                process.kill()
        ends.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return ends


def as_command(way: str, program: str, folder: Path) -> list[str]:
    (folder / "program.py").write_text(program)
    return [sys.executable, *{"-c": ["-c", program], "-m": ["-m", "program"], "file": [str(folder / "program.py")]}[way]]


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_it_finds_itself_as_any_process_does(tmp_path, way, session):
    reading, writing = os.pipe()
    try:
        options = {
            "cwd": tmp_path,
            "env": {"PATH": os.environ["PATH"], "A": "b"},
            "pass_fds": [reading],
            "stdin": subprocess.PIPE,
        }
        command = [*as_command(way, FACTS, tmp_path), "one", "two words"]
        started, forked = (json.loads(end.stdout) for end in both(command, start_new_session=session, **options))
    finally:
        os.close(reading)
        os.close(writing)
    assert started["parent"] == os.getpid()
    assert started["input"] == "a line\n"
    assert started["leads a session"] == session
    assert reading in started["descriptors"]
    assert (started.pop("torch"), forked.pop("torch")) == (False, True)
    started["environment"].pop("LC_CTYPE", None)  # an interpreter that starts in the C locale sets it
    forked["environment"].pop("LC_CTYPE", None)
    assert forked == started


@pytest.mark.parametrize(
    "program",
    [
        "print('buffered', end='')",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import os; os._exit(4)",
        "import atexit; atexit.register(print, 'last words'); raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()",
        "import sys; sys.stderr.write('to the other stream')",
        "import os; os.write(1, b'raw'); os.abort()",
    ],
)
def test_it_ends_as_any_process_does(program):
    started, forked = both([sys.executable, "-c", program], stdin=subprocess.DEVNULL)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_an_exception_is_told_last():
    started, forked = both([sys.executable, "-c", "raise ValueError('a reason')"])
    assert started.returncode == forked.returncode == 1
    assert started.stderr.splitlines()[-1] == forked.stderr.splitlines()[-1] == "ValueError: a reason"


def test_ctrl_c():
    warm()
    with Python([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"], **pipes()) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE)[1].endswith(b"KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


def pipes() -> dict[str, int]:
    return {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize(
    "options",
    [{"preexec_fn": lambda: None}, {"env": {"PYTHONIOENCODING": "ascii"}}, {"umask": 0o77}, {"close_fds": False}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_fork_cannot_do_is_started(options):
    warm()
    with Python([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], **pipes(), **options) as process:
        assert process.communicate(timeout=DEADLINE)[0] == b"False\n"


def test_programs_end_with_the_process_that_asked_for_them():
    program = """
import subprocess, sys, time
from tests.warm.popen import Python, warm
warm()
forked = Python([sys.executable, "-c", "import time; time.sleep(600)"])
print(forked.pid, flush=True)
time.sleep(600)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, start_new_session=True) as asking:
        try:
            forked = int(asking.stdout.readline())
            assert exists(forked)
        finally:
            asking.kill()
    assert until(lambda: not exists(forked))


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
