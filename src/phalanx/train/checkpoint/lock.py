"""Let one job at a time write in a directory, with a lock that the kernel releases however its holder ends.

    with one_job(out, comm):  # rank 0 holds the lock for all ranks
        ...

The lock is `flock` on the file `.lock` in the directory, which also names the holder. It belongs to a process: a second
Checkpointer of the same process shares it. Child processes never hold it: the file is closed on fork and on exec. On NFS, Linux
turns `flock` into a lock on the server, so it holds between hosts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from phalanx.comm.communicator import Communicator
from phalanx.comm.launch import MEETING
from phalanx.train.checkpoint.errors import CheckpointError

LOCK = ".lock"
PATIENCE = 5.0  # seconds to wait for a holder that is exiting: a killed process frees its memory before its locks
LOOK = 0.05  # seconds between two attempts
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems without locks


class DirectoryInUseError(CheckpointError):
    """Another job writes in this directory."""


class DirectoryLock:
    """This process's right to write in `directory`, until `release` or until it is collected.

    DirectoryInUseError names the holder. On a file system without locks you get a warning, and no protection.
    """

    def __init__(self, directory: Path, *, patience: float | None = None) -> None:
        self._claim = _take(directory, PATIENCE if patience is None else patience)
        self._release = weakref.finalize(self, _drop, self._claim)

    def stands(self) -> bool:
        """Whether the lock still protects the directory. The file or the directory may have been deleted."""
        return self._claim.stands()

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._release()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def one_job(directory: Path, comm: Communicator) -> Iterator[None]:
    """Create `directory` if needed, and lock it for this job. All ranks call it; it raises on all or on none."""
    lock: DirectoryLock | None = None

    def claim() -> tuple[bool, str] | None:
        nonlocal lock
        problem: tuple[bool, str] | None = None
        if comm.rank == 0 and lock is None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock = DirectoryLock(directory)
            except DirectoryInUseError as error:
                problem = True, str(error)
            except OSError as error:
                problem = False, f"cannot write in {directory}: {error.strerror or error}"
        told: tuple[bool, str] | None = comm.bcast_obj(problem)
        return told

    problem = comm.as_one(claim)  # if rank 0 of an elastic job dies in it, the next rank 0 takes the lock
    if problem is not None:
        in_use, text = problem
        raise DirectoryInUseError(text) if in_use else CheckpointError(text)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


# ---- the locks of this process ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Claim:
    """The locked file, and how many users it has in this process. `file` is None without locks, and after a fork."""

    path: Path
    file: int | None
    users: int = 0

    def stands(self) -> bool:
        if self.file is None:
            return True
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


_claims: dict[tuple[int, int], _Claim] = {}  # by device and inode of the directory
_mutex = threading.RLock()  # re-entrant: garbage collection may release a lock while another is taken


def _take(directory: Path, patience: float) -> _Claim:
    deadline = time.monotonic() + patience
    while True:
        with _mutex:
            at = os.stat(directory)
            claim = _claims.get((at.st_dev, at.st_ino))
            if claim is None or not claim.stands():
                claim = _try(directory / LOCK)
            if claim is None and _left_behind(directory / LOCK):
                with suppress(FileNotFoundError):
                    (directory / LOCK).unlink()
                continue
            if claim is not None:
                _claims[at.st_dev, at.st_ino] = claim
                claim.users += 1
                return claim
        if time.monotonic() > deadline:
            raise DirectoryInUseError(_explain(directory))
        time.sleep(LOOK)


def _try(path: Path) -> _Claim | None:
    """Take the lock; None if another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    claim = _Claim(path, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        claim.close()
        if isinstance(error, BlockingIOError):
            return None
        if error.errno in NO_LOCKS:
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error.strerror}): "
                "nothing keeps a second job from writing there too",
                RuntimeWarning,
                stacklevel=2,
            )
            return claim
        raise
    if not claim.stands():  # the previous holder deleted it between our open and our lock
        claim.close()
        return None
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "job": _elastic_job(),
    }
    with suppress(OSError):  # the lock works even if the disk is full
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
    return claim


def _elastic_job() -> str:
    """An id that all ranks of an elastic job share; empty for other jobs."""
    token = os.environ.get(MEETING, "").rpartition("/")[2]  # hosts may have different names for the meeting point
    return hashlib.sha256(token.encode()).hexdigest()[:16] if token else ""


def _left_behind(path: Path) -> bool:
    """Whether an earlier rank 0 of the same elastic job has the lock: it is stuck, and the others have dropped it."""
    try:
        holder = json.loads(path.read_text())
        return bool(holder["job"]) and holder["job"] == _elastic_job() and holder["pid"] != os.getpid()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _drop(claim: _Claim) -> None:
    with _mutex:
        claim.users -= 1
        if claim.users > 0 or claim.file is None:
            return
        for key, own in list(_claims.items()):
            if own is claim:
                del _claims[key]
        if claim.stands():
            with suppress(OSError):
                claim.path.unlink()  # before unlocking, so that a job that has it open notices and opens the next one
        claim.close()


def _close_in_child() -> None:
    """Close inherited descriptors in a child, which would otherwise hold the lock as long as it lives."""
    global _mutex  # the parent may have held it
    _mutex = threading.RLock()
    for claim in _claims.values():
        claim.close()
    _claims.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _explain(directory: Path) -> str:
    path = directory / LOCK
    try:
        holder = json.loads(path.read_text())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        who = "another process"
    return (
        f"{directory} is in use by another job ({who}): wait until it has ended, or use another directory. "
        f"If its host has crashed and the file system still keeps the lock, delete {path}"
    )
