"""Write a checkpoint: each rank writes its files in the background, and rank 0 completes the checkpoint.

    rank 0, background        files of rank 0 | waits for the others' | manifest | fsync | rename | delete old ones
    rank r, background        files of rank r |
    training thread    copy | steps ...

The ranks coordinate only through the shared directory: extra messages would disturb the order of those of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.comm.ending import process_is_ending
from phalanx.train.checkpoint.entries import Entry
from phalanx.train.checkpoint.errors import CheckpointError, explain
from phalanx.train.checkpoint.files import sync_directory, write_bytes, write_tensors
from phalanx.train.checkpoint.manifest import MANIFEST, Manifest, Sum, part
from phalanx.train.checkpoint.places import CheckpointPlace, delete, find_places
from phalanx.train.checkpoint.replicas import owns, structure_of
from phalanx.train.checkpoint.tree import Tensors, storable

PATIENCE = 600.0  # seconds without a new byte from other ranks; on a network file system they may appear a minute late
LAST_PATIENCE = 10.0  # the same once the program has ended: a dead rank never writes
LOOK = 0.005, 0.5  # seconds between checks for files of other ranks: the first and the longest
FAILED = "failed"  # rank-00003.failed holds the reason


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One rank's part of one checkpoint. Values only, because it outlives the step that made it."""

    directory: Path
    staging: str
    place: CheckpointPlace
    rank: int
    world: int
    config: Any
    entries: Mapping[str, Entry]  # without tensors, which are passed separately as copies
    owners: Mapping[str, tuple[int, ...]]
    keep: int
    rejected: frozenset[CheckpointPlace]  # damaged, so not worth keeping

    @property
    def writers(self) -> list[int]:
        return sorted({0}.union(*self.owners.values()))


def write(job: WriteJob, copies: Tensors, has_left: Callable[[int], bool] = lambda rank: False) -> None:
    """Write this rank's files. Rank 0 then waits for the others' files, unless one `has_left`, and completes the checkpoint."""
    staging = job.directory / job.staging
    try:
        if job.rank in job.writers:
            _write_part(job, copies, staging)
        if job.rank == 0:
            _complete(job, staging, has_left)
    except BaseException as error:
        _give_up(job, staging, error)
        if isinstance(error, FileNotFoundError) and not staging.is_dir():
            why = ", or rank 0 gave up the checkpoint and says why" if job.rank else ""
            raise CheckpointError(f"step {job.place.step}: {staging} disappeared while it was written{why}") from error
        if isinstance(error, OSError):
            raise CheckpointError(f"step {job.place.step}: {job.directory}: {explain(error)}") from error
        raise


def _write_part(job: WriteJob, copies: Tensors, staging: Path) -> None:
    tensors = None
    if copies:
        tensors = write_tensors(staging / part(job.rank, "safetensors"), {name: storable(x) for name, x in copies.items()})
    structures = {
        name: {"kind": entry.kind, "shapes": entry.shapes, "tree": entry.tree}
        for name, entry in job.entries.items()
        if owns(job.rank, structure_of(name), job.owners)
    }
    structure = {"tensors": tensors and asdict(tensors), "entries": structures}
    # last, and atomically: if this file exists, the part is complete
    write_bytes(staging / part(job.rank, "json"), json.dumps(structure, allow_nan=False).encode())


def _complete(job: WriteJob, staging: Path, has_left: Callable[[int], bool]) -> None:
    files: dict[str, Sum] = {}
    for rank, data in _await_parts(staging, job.writers, has_left):
        tensors = json.loads(data)["tensors"]
        files[part(rank, "json")] = Sum.of(data)
        if tensors:
            files[part(rank, "safetensors")] = Sum(**tensors)
    manifest = Manifest(job.place.step, job.world, job.config, tuple(job.entries), files, job.owners)
    write_bytes(staging / MANIFEST, manifest.to_bytes())
    os.rename(staging, job.directory / job.place.name)
    sync_directory(job.directory)
    # delete old ones only after the new one is durable; newer ones are damaged, and training will replace them
    older = [place for place in find_places(job.directory) if place <= job.place]
    useful = [place for place in older if place not in job.rejected]
    for place in older:
        if place not in useful[: job.keep]:
            delete(job.directory, place)


def _await_parts(staging: Path, writers: Iterable[int], has_left: Callable[[int], bool]) -> Iterable[tuple[int, bytes]]:
    pause, seen, since, ending = LOOK[0], -1, time.monotonic(), False
    for rank in writers:
        path, failed = staging / part(rank, "json"), staging / part(rank, FAILED)
        while not path.exists():
            if failed.exists():
                raise CheckpointError(f"rank {rank} could not write its part: {failed.read_text(errors='replace')}")
            if has_left(rank) and not path.exists():
                raise CheckpointError(f"rank {rank} died before it had written its part")
            size = _size(staging)
            if size != seen or process_is_ending() != ending:
                seen, since, ending = size, time.monotonic(), process_is_ending()
            if time.monotonic() - since > (LAST_PATIENCE if ending else PATIENCE):
                raise CheckpointError(f"{path} did not appear: has rank {rank} ended, or does it use another directory?")
            time.sleep(pause)
            pause = min(2 * pause, LOOK[1])
        yield rank, path.read_bytes()


def _size(staging: Path) -> int:
    """The number of bytes that all ranks have written so far."""
    with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
        return sum((found := entry.stat()).st_size + 512 * found.st_blocks for entry in os.scandir(staging))
    return -1


def _give_up(job: WriteJob, staging: Path, error: BaseException) -> None:
    """Clean up. A rank that cannot write leaves a note for rank 0, which is waiting for its part."""
    if job.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # on a full disk the note is empty, but its name is enough
        (staging / part(job.rank, FAILED)).write_text(explain(error) if isinstance(error, OSError) else repr(error))
