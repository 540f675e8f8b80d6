"""A process that has imported torch and phalanx and forks ranks from that state: a rank starts in milliseconds, not seconds.

Each line on stdin asks for one process: {"program", "args", "env", "out", "err"}. The child runs the program as `__main__` at
the top of the interpreter, so uncaught exceptions, `sys.exit` and exit handlers take the way they take in `python program.py`.
Each line on stdout tells what became of one: {"pid"} when it was forked, {"pid", "code", "at"} when it ended. When stdin closes
the zygote kills what it started, by process id, and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import sys
import time

import torch.distributed  # noqa: F401  before any fork, and before any thread

import phalanx.comm.create
import phalanx.comm.transports.torch  # noqa: F401


def serve() -> dict:
    """Fork on request; only the children return, with what they shall run."""
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    living: set[int] = set()
    text = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, code in reap(living):
                tell({"pid": pid, "code": code, "at": time.monotonic()})
        if 0 in ready:
            more = os.read(0, 1 << 16)
            if not more:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(wake_read)
                    os.close(wake_write)
                    return json.loads(line)
                living.add(pid)
                tell({"pid": pid})


def reap(living: set[int]) -> list[tuple[int, int]]:
    ended = []
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        living.discard(pid)
        ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def tell(news: dict) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def become(request: dict) -> None:
    """The streams, arguments and environment of a fresh process; SIGUSR1 prints all its stacks."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, request["out"]), (2, request["err"])):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(request["env"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.argv = [request["program"], *request["args"]]


gc.freeze()  # what is imported is shared with the children, and not searched for garbage when they end
request = serve()
become(request)
runpy.run_path(request["program"], run_name="__main__")
