"""Two jobs on one directory: the second is refused in one sentence, but may read; a dead holder holds nothing."""

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from tests.long import only_long
from tests.world.programs.herd import clean_environment

import phalanx
from phalanx import Checkpointer
from phalanx.cli.main import main
from phalanx.train.checkpoint import CheckpointError, lock
from phalanx.train.checkpoint.lock import DirectoryInUseError, DirectoryLock, one_job
from phalanx.train.checkpoint.places import find_places

pytestmark = pytest.mark.usefixtures("warm_python")
DEADLINE = 60.0  # seconds for a process to say something; it imports torch

# Takes what its first argument names, says so, and keeps it until its standard input ends; "fork" has a child that outlives it.
HOLDER = """
import os, sys
from pathlib import Path
import torch, phalanx
from phalanx.train.checkpoint.lock import DirectoryLock
what, directory = sys.argv[1:]
if what == "checkpointer":
    comm = phalanx.create_communicator()
    checkpoints = phalanx.Checkpointer(directory, comm)
    checkpoints.save(1, x=torch.ones(3))
    checkpoints.wait()
else:
    lock = DirectoryLock(Path(directory))
child = os.fork() if what == "fork" else None
if child == 0:
    import time
    time.sleep(60)
    os._exit(0)
print(os.getpid(), child, flush=True)
sys.stdin.read()
os._exit(0)
"""


class Holder:
    """A process that holds a lock until it is let go, or killed."""

    def __init__(self, what, directory):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, what, str(directory)],
            env=clean_environment() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, child = self.process.stdout.readline().split()
        self.child = None if child == "None" else int(child)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE)
        finally:
            self.process.kill()
            self.process.stdout.close()
            if self.child is not None:
                os.kill(self.child, signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.2)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A directory that another process has, and that process."""
    directory = tmp_path_factory.mktemp("held")
    with Holder("lock", directory) as holder:
        yield directory, holder.pid
    with DirectoryLock(directory):  # it is free when the holder has ended
        pass
    assert os.listdir(directory) == []


def told(directory, pid):
    """The whole sentence but for the time: where, who, and what to do."""
    return (
        rf"^{directory} is in use by another job \(process {pid} on {socket.gethostname()}, since [-0-9T:+]+\): wait until it "
        rf"has ended, or use another directory\. If its host has crashed and the file system still keeps the lock, "
        rf"delete {directory}/\.lock$"
    )


# ---- the lock ------------------------------------------------------------------------------------------------------------------


def test_all_ranks_are_refused_in_one_sentence(held, impatient):
    directory, pid = held

    def play(comm):
        with pytest.raises(DirectoryInUseError, match=told(directory, pid)), one_job(directory, comm):
            pass

    phalanx.run_local(3, play)


def test_the_holder_is_on_file(tmp_path):
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_killed_holder_holds_nothing_even_where_its_children_live(tmp_path):
    with Holder("fork", tmp_path) as holder:
        holder.process.kill()
        with DirectoryLock(tmp_path):
            os.kill(holder.child, 0)


def test_a_child_has_no_part_in_the_lock_of_its_parent(tmp_path):
    """Neither does it hold it, nor does its end take it from its parent."""
    with DirectoryLock(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                DirectoryLock(tmp_path, patience=0.1)
            except DirectoryInUseError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        listing = "import glob, os; print([os.path.realpath(own) for own in glob.glob('/proc/self/fd/*')])"
        found = subprocess.run([sys.executable, "-c", listing], close_fds=False, capture_output=True, text=True, check=True)
        assert "pipe:" in found.stdout
        assert ".lock" not in found.stdout
        with pytest.raises(BlockingIOError):
            _lock_elsewhere(tmp_path)


def _lock_elsewhere(directory):
    """With an open file of its own, as another process would."""
    with open(directory / ".lock", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_process_may_have_it_twice(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.release()
    first.release()
    with pytest.raises(BlockingIOError):
        _lock_elsewhere(tmp_path)
    second.release()
    assert os.listdir(tmp_path) == []


def test_collected_is_released(tmp_path):
    DirectoryLock(tmp_path)
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_deleted_file_is_noticed(tmp_path):
    with DirectoryLock(tmp_path) as first:
        assert first.stands()
        (tmp_path / ".lock").unlink()
        assert not first.stands()
        with DirectoryLock(tmp_path) as second:
            assert second.stands()
            assert not first.stands()
    assert os.listdir(tmp_path) == []


def test_many_processes_take_turns(tmp_path):
    """Each deletes the file when it lets go, while others are opening it: never do two hold it."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "count").read_text() == "40"


def _count(directory):
    for _ in range(10):
        with DirectoryLock(directory, patience=DEADLINE):
            path = directory / "count"
            seen = int(path.read_text()) if path.exists() else 0
            time.sleep(0.001)
            path.write_text(str(seen + 1))


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="a file system without locks"), DirectoryLock(tmp_path) as held:
        assert held.stands()


# ---- checkpoints ---------------------------------------------------------------------------------------------------------------


def test_a_second_job_may_read_but_not_save_until_the_first_is_killed(tmp_path, impatient):
    def play(comm, pid):
        x = torch.zeros(3)
        with Checkpointer(tmp_path, comm) as checkpoints:
            assert checkpoints.load(x=x) == 1
            if pid is None:
                checkpoints.save(2, x=x)
            else:
                with pytest.raises(CheckpointError, match=told(tmp_path, pid)):
                    checkpoints.save(2, x=x)

    with Holder("checkpointer", tmp_path) as holder:
        phalanx.run_local(2, lambda comm: play(comm, holder.pid))
        assert [place.step for place in find_places(tmp_path)] == [1]
        lock.PATIENCE = 5.0
        holder.process.kill()
        phalanx.run_local(2, lambda comm: play(comm, None))
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000002"]


def test_histories_are_not_mixed(tmp_path, comm):
    """A job that loaded while another one was saving, and saves when that one has ended: two pasts, of which one must yield."""
    x = torch.zeros(3)
    with Checkpointer(tmp_path, comm) as first, Checkpointer(tmp_path, comm) as second:
        assert second.load(x=x) is None
        first.save(10, x=x)
        first.wait()
        with pytest.raises(CheckpointError, match=r"step-000000010 was saved by another job or Checkpointer since this one"):
            second.save(3, x=x)
        assert second.load(x=x) == 10
        second.save(11, x=x)
        second.wait()
        with pytest.raises(CheckpointError, match="step-000000011 was saved by another job"):
            first.save(12, x=x)
    assert [place.step for place in find_places(tmp_path)] == [11, 10]


def test_a_checkpointer_that_was_not_closed_is_no_obstacle_in_its_own_process(tmp_path, comm):
    x = torch.zeros(3)
    first = Checkpointer(tmp_path, comm)
    first.save(1, x=x)
    first.wait()
    with Checkpointer(tmp_path, comm) as second:
        assert second.load(x=x) == 1
        second.save(2, x=x)
    first.close()
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000002"]


# ---- phalanx train -------------------------------------------------------------------------------------------------------------

QUICK = ["--set", "model.width=4", "--set", "rate.warmup=0.5"]


def phalanx_train(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", "train", *words], env=clean_environment() | {"OMP_NUM_THREADS": "1"}, **pipes
    )


def until(condition, process):
    began = time.monotonic()
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() - began < DEADLINE
        time.sleep(0.02)


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["anew", "resume"])
def test_a_second_run_is_refused_in_one_line_and_changes_nothing(held, capsys, impatient, resume):
    directory, pid = held
    assert main(["train", "--out", str(directory), "--ranks", "1", *QUICK, *resume]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"phalanx: {directory} is in use by another job (process {pid} on ")
    assert err.count("\n") == 1
    assert os.listdir(directory) == [".lock"]


@only_long
def test_a_killed_run_is_resumed_at_once(tmp_path):
    """While it runs no other may begin, and of the ranks of the other one speaks; the kernel takes the lock back."""
    words = ["--out", str(tmp_path), "--resume", "--set", "epochs=400", "--set", "checkpoint_every=2", *QUICK]
    checkpoints = tmp_path / "checkpoints"
    with phalanx_train(*words, "--ranks", "1") as first:
        try:
            until(lambda: checkpoints.is_dir() and find_places(checkpoints), first)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "phalanx", "train"]
            second = subprocess.run(
                [sys.executable, *torchrun, *words], env=clean_environment(), capture_output=True, text=True, timeout=DEADLINE
            )
            assert second.returncode == 1
            assert second.stderr.count(f"phalanx: {tmp_path} is in use by another job (process {first.pid} on ") == 1
            assert first.poll() is None
        finally:
            first.kill()
            first.communicate(timeout=DEADLINE)
    with phalanx_train(*words, "--ranks", "1") as third:
        try:
            until(lambda: any("resumed after" in line for line in iter(third.stdout.readline, "")), third)
        finally:
            third.kill()
            third.communicate(timeout=DEADLINE)
