"""Ctrl-C and SIGTERM, at any moment of `phalanx train`: no traceback, the right exit code, and a run that can be resumed.

A Ctrl-C is one: a terminal of its own, whose foreground process group gets what the letter ^C sends.
"""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.long import LONG
from tests.warm.popen import Python, warm
from tests.world.programs.herd import clean_environment

from phalanx.cli.main import build_parser
from phalanx.cli.train import resolve
from phalanx.cli.train_directory import check_same_run
from phalanx.train.checkpoint.places import find_places
from phalanx.train.checkpoint.read import read
from phalanx.train.rows import read_rows

DEADLINE = 120.0  # seconds for one command, which imports torch in each rank
SLOW = bool(os.environ.get("PHALANX_TEST_SLOW"))
RUN = ["--set", "model.width=4", "--set", "epochs=500", "--set", "trace_steps=0"]


class OnTerminal(Python):
    """A program that is forked warm, and whose session has a terminal."""

    terminal = True


@dataclass
class Terminal:
    """A command in a terminal of its own, and what it prints there."""

    command: list[str]
    columns: int = 80
    text: str = ""
    code: int | None = None
    begun: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Terminal:
        warm()
        self.master, slave = pty.openpty()
        env = clean_environment() | {"OMP_NUM_THREADS": "1", "COLUMNS": str(self.columns), "TERM": "xterm"}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        if LONG:  # as a shell starts it, with an import of torch in each rank
            own = {"preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
            self.process = subprocess.Popen(self.command, **streams, env=env, start_new_session=True, **own)
        else:
            self.process = OnTerminal(self.command, **streams, env=env, start_new_session=True)
        os.close(slave)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def press(self, letter: bytes) -> None:
        os.write(self.master, letter)

    def until(self, done: Callable[[], object]) -> None:
        """Read until `done` or the end."""
        while not done() and self.code is None:
            assert time.monotonic() - self.begun < DEADLINE, self.text
            self.look(0.02)

    def look(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.text += os.read(self.master, 65536).decode()
                return
            except OSError:  # all of its processes have closed it
                pass
        self.code = self.process.poll()

    def end(self) -> str:
        """All that it prints to its end."""
        self.until(lambda: False)
        return self.text


def train(*words: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", "train", *words]


def evaluated(out: Path) -> bool:
    return any(row["kind"] == "evaluation" for row in read_rows(out / "metrics.jsonl"))


def check_stopped(text: str, code: int | None, out: Path, *, by: int = signal.SIGINT) -> None:
    """What holds at every moment: no traceback, and a run that is saved where it stopped, or was never begun."""
    assert code in (128 + by, -by), text  # the second is how a shell's 130 looks from outside: ended by the signal itself
    assert "Traceback" not in text
    assert "Error" not in text
    ends = [row for row in read_rows(out / "metrics.jsonl") if row["kind"] == "end"]
    if ends and ends[-1]["steps"]:
        place = find_places(out / "checkpoints")[0]
        assert place.step == ends[-1]["steps"]
        assert read(out / "checkpoints", place, ["model"]).saved
    else:
        assert "training had not begun" in text or "stopping before the first step" in text or text.strip() in ("", "^C")


@pytest.mark.parametrize("ranks", [1, 2] if LONG else [2])
def test_ctrl_c_in_a_terminal_saves_and_names_the_command_that_resumes(tmp_path, ranks):
    out = tmp_path / "run"
    with Terminal(train("--ranks", str(ranks), "--out", str(out), *RUN)) as terminal:
        terminal.until(lambda: evaluated(out))
        terminal.press(b"\x03")
        text = terminal.end()
    assert terminal.code == 130
    check_stopped(text, terminal.code, out)
    assert text.count("stopping: this step is finished and saved first") == 1
    (command,) = set(re.findall(r"to continue: (phalanx train .*?)\r\n", text))
    assert text.rstrip().splitlines()[-1].endswith("report.html")
    args = build_parser().parse_args(shlex.split(command)[1:])
    assert (args.resume, args.ranks, args.out) == (True, ranks, out)
    check_same_run(out, resolve(args.recipe, args.settings))  # raises if it is the command of another run


def test_a_second_ctrl_c_ends_at_once_also_ranks_that_hang(tmp_path):
    """The ranks are stopped, so they hear nothing. After one Ctrl-C they would have half a minute."""
    out = tmp_path / "run"
    with Terminal(train("--ranks", "2", "--out", str(out), *RUN)) as terminal:
        terminal.until(lambda: evaluated(out))
        pid = terminal.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [child for child in children if len(os.listdir(f"/proc/{child}/task")) > 1]  # what forks ranks has one thread
        assert len(ranks) == 2
        for rank in ranks:
            os.kill(int(rank), signal.SIGSTOP)
        terminal.press(b"\x03")
        terminal.until(lambda: "^C" in terminal.text)
        terminal.look(0.2)
        assert terminal.code is None, "it waits for them to save"
        begun = time.monotonic()
        terminal.press(b"\x03")
        text = terminal.end()
        assert time.monotonic() - begun < 20, "half a minute and more without the second one"
    assert terminal.code == 130
    assert "Traceback" not in text


GRID = [
    (ranks, moment, by) for ranks in (1, 2, 3) for moment in (0.0, 0.15, 0.5, 1.5, 3.0) for by in (signal.SIGINT, signal.SIGTERM)
]


@pytest.mark.parametrize(("ranks", "moment", "by"), GRID if SLOW else [(1, 1.0, signal.SIGINT)])
def test_at_any_moment(tmp_path, ranks, moment, by):
    """The signal goes to the whole process group, as from a terminal or a scheduler, at a random moment around `moment`."""
    out = tmp_path / "run"
    with subprocess.Popen(
        train("--ranks", str(ranks), "--out", str(out), *RUN),
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            time.sleep(moment + random.random() * max(0.1, moment))
            os.killpg(process.pid, by)
            text, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    if moment < 0.5 and "Traceback" in text:  # Python itself was starting, and ours had not begun
        assert "phalanx/cli/main.py" not in text
        return
    check_stopped(text, process.returncode, out, by=by)


@pytest.mark.skipif(not LONG, reason="PHALANX_TEST_LONG=1, as in CI")
def test_under_torchrun_the_ranks_save_and_print_no_traceback(tmp_path):
    """A terminal interrupts torchrun and all its ranks; torchrun then repeats the signal."""
    out = tmp_path / "run"
    words = ["--standalone", "--nproc-per-node", "2", "-m", "phalanx", "train", "--out", str(out), *RUN]
    with Terminal([sys.executable, "-m", "torch.distributed.run", *words]) as terminal:
        terminal.until(lambda: evaluated(out))
        terminal.press(b"\x03")
        text = terminal.end()
    place = find_places(out / "checkpoints")[0]
    assert place.step == read_rows(out / "metrics.jsonl")[-1]["steps"]
    assert text.count("stopping: this step is finished and saved first") == 1, text
    assert text.count("stopped on request") == 1
    assert "phalanx/" not in "".join(text.split("Traceback")[1:]), "torchrun prints a traceback of its own, and ours none"
