"""Processes that wait to become ranks, so that a replacement needs no time for its imports: `phalanx run --spares`.

    agent                                             spare
    the job has begun: starts it, CALM later   ---->  imports torch and phalanx, waits
    a rank dies: one line, the variables of its
    replacement                                ---->  runs the script, as a rank like the others
    starts the next one, CALM later

A spare knows neither its number nor the meeting point before that line, so it cannot join on its own. If the spare has died, the
rank starts as a new process, as without spares.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.comm.elastic.agents import End
from phalanx.comm.ending import say_last

# Seconds between the start of a process, or of the job, and the start of a spare: newcomers join undisturbed. Then the imports of
# the spare take 5 s of one core. No lower priority: a process without privileges cannot raise it again, and would be a slow rank.
CALM = 5.0


@dataclass
class Spares:
    """At most `count` processes that run `python COMMAND`, which waits for one line."""

    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    waiting: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _not_before: float = 0.0
    _died: int = 0  # since one was used

    def postpone(self) -> None:
        """Start none for a while; for twice as long after each one that died unused."""
        self._not_before = time.monotonic() + CALM * 2**self._died

    def keep(self, needed: int) -> None:
        """Start one if fewer wait than are needed, and if it is time."""
        for spare in [spare for spare in self.waiting if spare.poll() is not None]:
            self._forget(spare)
            self._failed(str(End(spare.returncode)))
        if len(self.waiting) < min(self.count, needed) and time.monotonic() >= self._not_before:
            try:
                self.waiting.append(start_python(self.command, self.env, subprocess.PIPE))
            except OSError as error:  # no more processes, or no memory for one
                self._failed(f"cannot start ({error.strerror})")
            else:
                self.postpone()

    def take(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """A process that becomes a rank with these variables; None if there is none."""
        for spare in list(self.waiting):
            if spare.poll() is None and spare.stdin is not None:
                with contextlib.suppress(OSError):  # it has died since
                    spare.stdin.write(json.dumps(dict(variables)).encode() + b"\n")
                    spare.stdin.flush()
                    self._died = 0
                    self._forget(spare)
                    return spare
        return None

    def kill(self) -> None:
        for spare in list(self.waiting):
            spare.kill()
            spare.wait()
            self._forget(spare)

    def _failed(self, how: str) -> None:
        self._died += 1
        self.postpone()
        say_last(f"a spare process {how}; another one starts in {CALM * 2**self._died:g} s")

    def _forget(self, spare: subprocess.Popen[bytes]) -> None:
        self.waiting.remove(spare)
        with contextlib.suppress(OSError):
            if spare.stdin is not None:
                spare.stdin.close()


def start_python(arguments: Sequence[str], env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    """In its own session, so that it gets Ctrl-C once, from this process, and not from the terminal as well."""
    return subprocess.Popen([sys.executable, *arguments], env=dict(env), stdin=stdin, start_new_session=True)
