"""The directory of checkpoints: finding complete ones, deleting old ones, and cleaning up after killed processes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.comm.communicator import Communicator
from phalanx.train.checkpoint.agree import from_rank_0
from phalanx.train.checkpoint.errors import CheckpointError, explain

PROBE_AGE = 60.0  # seconds; a younger probe may belong to a job that is just starting
SEEN_WITHIN = 5.0  # seconds for all ranks to see a file of rank 0; network file systems cache missing files

_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?", re.ASCII)
_LEFTOVER = re.compile(r"step-\d{9,}(?:\.\d+)?\.tmp-[0-9a-f]+", re.ASCII)
_PROBE = re.compile(r"\.probe-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class CheckpointPlace:
    """The name of a complete checkpoint; the newest is the largest."""

    step: int
    attempt: int = 1

    @property
    def name(self) -> str:
        return f"step-{self.step:09}" + (f".{self.attempt}" if self.attempt > 1 else "")

    @classmethod
    def parse(cls, name: str) -> CheckpointPlace | None:
        """Parse the name of a complete checkpoint; None if it is not one."""
        match = _NAME.fullmatch(name)
        place = match and cls(int(match[1]), int(match[2] or 1))
        return place if place and place.name == name else None

    def temporary(self) -> str:
        """A new name for a checkpoint that is being written or deleted."""
        return f"{self.name}.tmp-{secrets.token_hex(4)}"


def find_places(directory: Path) -> list[CheckpointPlace]:
    """The complete checkpoints in `directory`, newest first. They may still be damaged."""
    names = [item.name for item in os.scandir(directory) if item.is_dir(follow_symlinks=False)]
    return sorted((place for name in names if (place := CheckpointPlace.parse(name))), reverse=True)


def find_checkpoints(path: Path) -> tuple[Path, list[CheckpointPlace]]:
    """Given a run, its checkpoint directory or a checkpoint, return that directory and the checkpoints to try, newest first."""
    place = CheckpointPlace.parse(path.absolute().name)
    if place is not None and path.is_dir():
        return path.absolute().parent, [place]
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        places = find_places(directory)
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
    if not places:
        raise CheckpointError("there is no checkpoint")
    return directory, places


def make_probe(directory: Path) -> str:
    """Create an empty file for other ranks to look for, and `directory` if needed. Returns the file's name."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f".probe-{secrets.token_hex(4)}"
    (directory / name).touch(exist_ok=False)
    return name


def clean(directory: Path) -> None:
    """Delete what killed processes left behind."""
    for item in list(os.scandir(directory)):
        if _PROBE.fullmatch(item.name) and time.time() - item.stat(follow_symlinks=False).st_mtime > PROBE_AGE:
            Path(item.path).unlink(missing_ok=True)
        if _LEFTOVER.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path, ignore_errors=True)


def delete(directory: Path, place: CheckpointPlace) -> None:
    """Delete a checkpoint. If the process is killed in between, no partial checkpoint keeps its name."""
    doomed = directory / place.temporary()
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory / place.name, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def check_shared(directory: Path, comm: Communicator) -> None:
    """Create `directory` if needed, and check that all ranks see the same one. All ranks call it."""

    def place_probe() -> str:
        try:
            return make_probe(directory)
        except OSError as error:
            raise CheckpointError(f"cannot write in {directory}: {explain(error)}") from None

    path = directory / from_rank_0(comm, place_probe)
    deadline = time.monotonic() + SEEN_WITHIN
    while not (seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    all_seen = comm.allgather_obj(seen)
    if comm.rank == 0:
        path.unlink(missing_ok=True)
    if blind := [str(rank) for rank, own in enumerate(all_seen) if not own]:
        raise CheckpointError(
            f"rank(s) {', '.join(blind)} do not see what rank 0 writes in {directory}: checkpoints need a "
            "directory that all ranks share, such as one on a network file system"
        )
