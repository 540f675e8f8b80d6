"""`phalanx run --spares`: a process that has imported torch becomes the next rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tests.warm.popen import Python
from tests.world.test_elastic import DEADLINE, Job, check_exact, end_after, epochs_of, stop

from phalanx.cli.main import main
from phalanx.cli.spare import spare_command
from phalanx.comm.elastic import spares

pytestmark = pytest.mark.usefixtures("warm_python")

# `phalanx`, but spares start at once
SOON = (
    "-c",
    "from phalanx.comm.elastic import spares; spares.CALM = 0.1; from phalanx.cli.main import main; raise SystemExit(main())",
)


def spares_of(agent: int) -> set[int]:
    """Children that wait for a line. The input of a rank is /dev/null."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int(entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == agent and os.readlink(entry / "fd" / "0").startswith("pipe:"):
                found.add(int(entry.name))
    return found


def has_ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def test_spares_replace_ranks_as_long_as_they_live_and_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(Python, "launches", True)
    job = Job(
        tmp_path, 2, "epochs=100000", "pause=0.01", f"stop_file={tmp_path / 'stop'}", replace=3, phalanx=SOON, spares=1
    )  # fmt: skip
    agent, seen = job.process.pid, set[int]()

    def next_spare() -> int:
        job.until(lambda: spares_of(agent) - seen)
        (spare,) = spares_of(agent) - seen
        seen.add(spare)
        return spare

    def wait_for(member: int) -> None:
        """Until it has made a step: it has what the others would take along."""
        job.until(lambda: any(row["kind"] == "step" and row["member"] == member for row in job.follow.look()))

    try:
        job.until(lambda: len(job.pids) == 2)
        job.wait_for_step(2, 2)
        spare = next_spare()
        assert spare not in job.pids.values()
        job.signal(0)
        wait_for(2)
        assert job.pids[2] == spare, job.words
        assert os.readlink(f"/proc/{spare}/fd/0") == os.devnull
        assert os.getsid(spare) == spare  # as of every rank

        dead = next_spare()  # is killed before it is needed: the rank starts in the ordinary way, or as the next spare
        os.kill(dead, signal.SIGKILL)
        job.signal(1)
        wait_for(3)
        assert job.pids[3] != dead

        unused = next_spare()
        end_after(job, {2, 3})
        assert has_ended(unused)
        check_exact(job, epochs_of(job))
    finally:
        stop(job)


def test_a_spare_ends_with_its_agent(tmp_path):
    program = tmp_path / "script.py"
    program.write_text("print('runs')\n")
    for words in (b"", b'{"PHALANX'):  # the agent ended before the line, or within it
        command = [sys.executable, *spare_command([str(program)])]
        done = subprocess.run(command, input=words, capture_output=True, timeout=DEADLINE)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


SCRIPT = """
import atexit, inspect, os, pickle, sys, threading, time
import beside

class Kept:
    pass

def late() -> None:
    time.sleep(0.1)  # the script is over: Python waits for its threads
    print("late", type(pickle.loads(pickle.dumps(Kept()))).__name__)

print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sorted(globals().keys() - {"__annotations__"}))
print(sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), beside.WORD, repr(sys.stdin.read()))
print(os.environ["MINE"], late.__annotations__, inspect.getsource(Kept).split())
threading.Thread(target=late).start()
atexit.register(lambda: print("exit", flush=True))
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["file", "module", "package"])
def test_a_spare_runs_the_script_as_python_does(tmp_path, kind, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    for place in (tmp_path, elsewhere / "package"):
        place.mkdir(parents=True, exist_ok=True)
    (tmp_path / "script.py").write_text(SCRIPT)
    (elsewhere / "package" / "__main__.py").write_text(SCRIPT)
    for place in (tmp_path, elsewhere):
        (place / "beside.py").write_text("WORD = 'found'\n")
    cwd = tmp_path if kind == "module" else elsewhere
    monkeypatch.chdir(cwd)
    arguments = {"file": ["../script.py"], "module": ["-m", "script"], "package": ["-m", "package"]}[kind] + ["--flag", "-m"]
    real = os.environ | {"MINE": "yes", "PYTHONIOENCODING": "utf-8"}  # which has it executed, not forked
    python = subprocess.run(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, env=real
    )
    spare = subprocess.run(
        [sys.executable, *spare_command(arguments)], input='{"MINE": "yes"}\n', capture_output=True, text=True, timeout=DEADLINE
    )
    assert python.returncode == 7, python.stderr
    assert "late Kept" in python.stdout
    assert (spare.returncode, spare.stdout, spare.stderr) == (7, python.stdout, python.stderr)


FAILS = """
def fail():
    raise KeyError("gone")

try:
    fail()
except KeyError as error:
    raise ValueError("no") from error
"""


@pytest.mark.parametrize("script", [FAILS, "x = (\n"], ids=["exception", "syntax"])
def test_the_traceback_of_a_spare_begins_with_the_script(tmp_path, script):
    program = tmp_path / "script.py"
    program.write_text(script)
    real = os.environ | {"PYTHONIOENCODING": "utf-8"}  # which has it executed, not forked
    python = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=DEADLINE, env=real)
    command = [sys.executable, *spare_command([str(program)])]
    spare = subprocess.run(command, input="{}\n", capture_output=True, text=True, timeout=DEADLINE)
    assert "Error: " in python.stderr
    assert (spare.returncode, spare.stderr) == (python.returncode, python.stderr) == (1, python.stderr)


def test_a_spare_runs_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "import sys, inside; print(__name__, sys.argv[1:], inside.WORD)")
        archive.writestr("inside.py", "WORD = 'found'")
    command = [sys.executable, *spare_command([str(tmp_path / "app.pyz"), "--flag"])]
    done = subprocess.run(command, input="{}\n", capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, "__main__ ['--flag'] found\n"), done.stderr


def test_spares_that_die_start_ever_more_seldom_and_are_never_taken(monkeypatch, capfd):
    monkeypatch.setattr(spares, "CALM", 0.05)
    kept = spares.Spares(["-c", "raise SystemExit(3)"], dict(os.environ), count=1)
    end = time.monotonic() + DEADLINE
    words = ""
    try:
        while words.count("\n") < 3:
            assert time.monotonic() < end
            kept.keep(1)
            words += capfd.readouterr().err
            time.sleep(0.005)
        assert kept.take({}) is None
        assert words.splitlines() == [
            f"phalanx: a spare process exited with code 3; another one starts in {after} s" for after in (0.1, 0.2, 0.4)
        ]
        kept.keep(0)
        assert not kept.waiting  # none is needed
    finally:
        kept.kill()


def test_spares_need_replacements(tmp_path, capsys):
    program = tmp_path / "script.py"
    program.write_text("")
    assert main(["run", "--ranks", "1", "--spares", "1", str(program)]) == 2
    assert "--spares 1: spare processes replace ranks that die, and --replace K says how often" in capsys.readouterr().err
