"""Starts worlds of real processes, strikes them, and tells how each rank ended. No launcher: nobody else cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm.popen import Python, warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATIENCE = 90.0  # seconds for what is not under test: to fork, to meet, to be reaped


@dataclass(frozen=True)
class Case:
    """A world and what befalls it: `victim` gets `strike` once all ranks have said `word` and `after` more seconds have passed.

    Without a victim all ranks get it. FOLDER in an argument is a folder of this world's own.
    """

    scenario: str
    args: dict[str, object]
    ranks: int = 3
    absent: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    strike: signal.Signals | None = None
    victim: int = -1
    sleepers: tuple[int, ...] = ()  # ranks that do not end by themselves, besides a victim that was stopped
    word: str = "ready"
    after: float = 0.3
    wholly: bool = True  # its ranks take all libraries apart when they end; otherwise not, which saves 0.3 s each
    shared: bool = False  # all-reduces on shared memory, where the native core is built; otherwise all messages go over gloo
    port: int = 0  # where they meet; 0: a free one
    deadline: float = 40.0  # seconds after the strike, or the start, by which all others have ended


@dataclass(frozen=True)
class Outcome:
    """Exit codes and times by rank (`time.monotonic`, one clock for all), what each said on stdout, and their common stderr."""

    codes: dict[int, int]
    ended: dict[int, float]
    said: dict[int, list[dict]]
    stderr: str
    started: float
    struck: float
    folder: Path
    port: int
    pids: dict[int, int]

    def word(self, rank: int, what: str) -> dict:
        """The first line of this kind that `rank` said."""
        found = [line for line in self.said[rank] if line["what"] == what]
        assert found, f"rank {rank} never said {what!r}: {self.said}\n{self.stderr}"
        return found[0]


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher, or the user, may have left in it."""
    foreign = ("SLURM_", "OMPI_", "PMI", "PRTE", "MPI_", "TORCHELASTIC", "PHALANX_", "GLOO_", "MASTER_")
    mine = os.environ.keys() - {"RANK", "WORLD_SIZE"}
    env = {name: os.environ[name] for name in mine if not name.startswith(foreign)}
    # torch's store asks for the name of every address that it talks to: a DNS that does not answer must not take 5 s
    return env | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


class Whole(Python):
    """A process whose end is the subject of a test."""

    ends_wholly = True


class Herd:
    """Processes that are forked with torch and phalanx imported, and the end of each as soon as it comes."""

    def __init__(self) -> None:
        warm()
        self._news = threading.Condition()
        self._ranks: dict[int, Python] = {}
        self._watchers: list[threading.Thread] = []
        self._ended: dict[int, tuple[int, float]] = {}

    def fork(self, program: Path, args: Sequence[str], env: dict[str, str], out: Path, err: Path, *, wholly: bool = True) -> int:
        """The process id of a new process that runs `program`."""
        with open(out, "ab") as said, open(err, "ab") as complained:
            command, null = [sys.executable, str(program), *args], subprocess.DEVNULL
            rank = (Whole if wholly else Python)(
                command, env=clean_environment() | env, stdin=null, stdout=said, stderr=complained
            )
        self._ranks[rank.pid] = rank
        self._watchers.append(threading.Thread(target=self._watch, args=(rank,), daemon=True))
        self._watchers[-1].start()
        return rank.pid

    def wait(self, pid: int, deadline: float) -> tuple[int, float] | None:
        """(exit code, time of death), or None if it still lives at the deadline."""
        with self._news:
            self._news.wait_for(lambda: pid in self._ended, max(0.0, deadline - time.monotonic()))
            return self._ended.get(pid)

    def close(self) -> None:
        """End those that still run, by process id."""
        for rank in self._ranks.values():
            rank.kill()
        for watcher in self._watchers:
            watcher.join(PATIENCE)

    def _watch(self, rank: Python) -> None:
        code = rank.wait()
        with self._news:
            self._ended[rank.pid] = code, time.monotonic()
            self._news.notify_all()


def play(herd: Herd, case: Case, folder: Path) -> Outcome:
    """Start the world of `case`, strike, wait; whatever happens, none of its processes survives."""
    port = case.port or free_port()
    started = time.monotonic()
    err = folder / "stderr"
    err.touch()
    pids: dict[int, int] = {}
    try:
        for rank in range(case.ranks):
            if rank not in case.absent:
                env = {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                env |= case.env if case.shared else {"PHALANX_FORM": "moves", **case.env}
                args = [case.scenario, json.dumps(case.args).replace("FOLDER", str(folder))]
                pids[rank] = herd.fork(HERE / "faults.py", args, env, folder / f"stdout.{rank}", err, wholly=case.wholly)
        struck = started
        if case.strike is not None:
            _wait_for_word(case.word, herd, pids, folder, time.monotonic() + PATIENCE)
            time.sleep(case.after)
            struck = time.monotonic()
            for pid in pids.values() if case.victim == -1 else [pids[case.victim]]:
                os.kill(pid, case.strike)
        stopped = {*case.sleepers, case.victim} if case.strike == signal.SIGSTOP else set(case.sleepers)
        deadline = time.monotonic() + case.deadline
        late = [rank for rank, pid in pids.items() if rank not in stopped and herd.wait(pid, deadline) is None]
        for rank in late:  # ask for all its stacks before it is ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGUSR1)
        if late:
            time.sleep(0.5)
    finally:
        for pid in pids.values():
            if herd.wait(pid, 0) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # ends a stopped process too
        ends = {rank: herd.wait(pid, time.monotonic() + PATIENCE) for rank, pid in pids.items()}
    said = {rank: [json.loads(line) for line in (folder / f"stdout.{rank}").read_text().splitlines()] for rank in pids}
    text = err.read_text()
    assert not late, f"rank(s) {late} still ran {case.deadline:g} s later: {said}\n{text}"
    codes, ended = ({rank: end[i] for rank, end in ends.items()} for i in (0, 1))
    return Outcome(codes, ended, said, text, started, struck, folder, port, pids)


def _wait_for_word(word: str, herd: Herd, pids: dict[int, int], folder: Path, deadline: float) -> None:
    for rank, pid in pids.items():
        out = folder / f"stdout.{rank}"
        while f'"{word}"' not in (out.read_text() if out.exists() else ""):
            assert herd.wait(pid, 0) is None, f"rank {rank} ended too early: {(folder / 'stderr').read_text()}"
            assert time.monotonic() < deadline, f"rank {rank} has not said {word!r}"
            time.sleep(0.02)


def free_port() -> int:
    """A port outside the range from which the kernel serves others, free a moment ago."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
