"""`phalanx run`: starts the ranks of an elastic job on this host, replaces those that die, and holds the meeting point.

    supervisor                                        rank
    opens a loopback port
    starts ranks, with the secret in their environment --> connect, sign what they write
    serves the store, decides who is a member        <--- signs of life, reports
    a rank dies: a new epoch without it; starts another one, as long as --replace allows

The supervisor is no rank and does not train, so every rank may die. If the supervisor itself dies, all ranks stop: they raise a
CommunicationError at their next communication, with which a script can save a checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.comm.elastic.board import Board, MeetingPoint
from phalanx.comm.elastic.coordinator import Coordinator
from phalanx.comm.elastic.guard import FENCED
from phalanx.comm.ending import say_last
from phalanx.comm.launch import MEETING, MEMBER, SECRET
from phalanx.comm.rendezvous import serve
from phalanx.comm.settings import AGENT
from phalanx.comm.start import handling

LOOK = 0.02  # seconds between two looks at the ranks
TOO_FEW = 74  # the exit code when fewer ranks are left than the script wants: EX_IOERR of sysexits.h
GRACE = 30.0  # seconds that ranks have to end after a signal, or after the job has failed
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Supervisor:
    """Runs `python ARGUMENTS` on `count` ranks of this host, and starts at most `budget` more for those that die."""

    count: int
    arguments: Sequence[str]
    budget: int = 0
    env: Mapping[str, str] | None = None
    announces: bool = True  # a line for every change of membership
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    _started: int = 0
    _were_in: set[int] = field(default_factory=set)

    def run(self) -> int:
        """Until all ranks have ended; returns the exit code of the job."""
        heard: list[int] = []
        with handling(heard), socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self._point = MeetingPoint("127.0.0.1", listener.getsockname()[1], secrets.token_hex(8))
            self._common = self._environment()
            os.environ[SECRET] = self._common[SECRET]
            try:
                for _ in range(self.count):
                    self._start()  # now: they import torch while this process does
                store = serve(listener, self._point.host, self.count, datetime.timedelta(seconds=60))
                board = Board(self._point, 60.0, store)
                return self._watch(Coordinator(board, self.count, say=say_last if self.announces else lambda words: None), heard)
            finally:
                self._kill()

    def _environment(self) -> dict[str, str]:
        found = dict(os.environ if self.env is None else self.env)
        for name in LAUNCHER:  # of a launcher that started this process: its ranks are others
            found.pop(name, None)
        found |= {AGENT: str(os.getpid()), MEETING: self._point.to_text(), SECRET: secrets.token_hex(32)}
        found.setdefault("OMP_NUM_THREADS", "1")  # ranks that share a machine fight for its cores
        found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return found

    def _start(self) -> int:
        member, self._started = self._started, self._started + 1
        self.processes[member] = subprocess.Popen(
            [sys.executable, *self.arguments],
            env=self._common | {MEMBER: str(member)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes from this process, once, and not from the terminal as well
        )
        return member

    def _watch(self, coordinator: Coordinator, heard: list[int]) -> int:
        for member in self.processes:
            coordinator.expect(member)
        sent, until = 0, float("inf")
        failed = 0
        while True:
            ended = self._ended()
            while sent < len(heard):
                if heard[sent] == signal.SIGTSTP:  # the ranks have to stop before this process does
                    del heard[sent]
                    self._signal(signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell says `fg`
                    self._signal(signal.SIGCONT)
                    continue
                self._signal(heard[sent])
                sent, until = sent + 1, time.monotonic() + GRACE
            running = set(self.processes) - self.codes.keys() - self.given_up
            begun = coordinator.proposal is not None
            given_up = coordinator.look(ended, expected=None if begun else len(running))
            self.given_up |= given_up.keys()
            lost = [m for m in {**ended, **given_up} if self.codes.get(m) != 0]
            running -= given_up.keys()
            proposal = coordinator.proposal
            self._were_in |= coordinator.roster.standing
            # who was never a member came too late; the others may still save what they have learned
            over = proposal is not None and not proposal.members and not running & self._were_in
            if not running or over or time.monotonic() > until:
                break
            if not heard and not failed:
                for _ in lost[: self.budget if begun else 0]:
                    self.budget -= 1
                    coordinator.expect(self._start())
                failed = self._too_few(coordinator)
                if failed:
                    until = time.monotonic() + GRACE
            time.sleep(LOOK)
        if heard:
            return 128 + heard[0]
        return failed or self._outcome()

    def _ended(self) -> dict[int, str]:
        """Members whose processes are over since the last look, and how."""
        found = {}
        for member, process in self.processes.items():
            if member in self.codes or (code := process.poll()) is None:
                continue
            self.codes[member] = code
            if member not in self.given_up:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                found[member] = how if code else "finished"
        return found

    def _too_few(self, coordinator: Coordinator) -> int:
        """Whether the job has to end, because fewer ranks are left than it wants and none will come; the exit code."""
        proposal = coordinator.proposal
        if proposal is None or not coordinator.roster.stands:
            return 0
        coming = len(set(self.processes) - self.codes.keys() - self.given_up - set(proposal.members))
        finished = any(code == 0 for code in self.codes.values())
        if len(proposal.members) >= coordinator.wants.least or coming or self.budget or finished:
            return 0
        words = f"{len(proposal.members)} of at least {coordinator.wants.least} ranks are left, and no more will come"
        say_last(words)
        coordinator.board.stop(words)
        return TOO_FEW

    def _outcome(self) -> int:
        """0 if the job outlived its losses: a rank came to the end of its script, and none raised after that."""
        codes = [code for member, code in self.codes.items() if member not in self.given_up and code != FENCED]  # in order
        if 0 in codes:
            return next((code for code in codes[codes.index(0) :] if code > 0), 0)
        return _status(codes[-1]) if codes else 1

    def _signal(self, number: int) -> None:
        for member, process in self.processes.items():
            if member not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _kill(self) -> None:
        """Return when no rank is left, not even one that stood still."""
        self._signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


def _status(code: int) -> int:
    return code if code > 0 else 128 - code
