"""A checkpoint on disk: a directory that is complete or absent, and whose every byte is accounted for in its manifest.

step-000000120/
  manifest.json            step, world size, config, who owns what, and size and SHA-256 of all files; sealed by its own SHA-256
  rank-00000.json          the structure of every entry, as rank 0 saved it
  rank-00000.safetensors   its tensors
  rank-00003.json          what rank 3 had different from rank 0, if anything
  rank-00003.safetensors
step-000000150.2/          a second checkpoint of step 150: none is ever overwritten
step-000000180.tmp-5f31/   being written, being deleted, or left behind by a process that was killed
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from phalanx.schedule.plain_json import brief, loads, read_whole
from phalanx.train.manifest_fields import LARGEST, MAX_WORLD, read_config, read_entries, read_files, read_owners

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK = 1 << 20  # bytes read at a time
PROBE_AGE = 60.0  # seconds; a younger one may be that of a job that starts just now
LARGEST_JSON = 1 << 30  # bytes; a larger one is not ours, and not worth the memory to find out

_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?", re.ASCII)
_LEFTOVER = re.compile(r"step-\d{9,}(?:\.\d+)?\.tmp-[0-9a-f]+", re.ASCII)
_PROBE = re.compile(r"\.probe-[0-9a-f]+", re.ASCII)
_SEAL = re.compile(rb'(.*),\n "sha256": "([0-9a-f]{64})"\n}\n', re.DOTALL)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or none of those that exist can be used."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """The name of a complete checkpoint; the newest is the largest."""

    step: int
    attempt: int = 1

    @property
    def name(self) -> str:
        return f"step-{self.step:09}" + (f".{self.attempt}" if self.attempt > 1 else "")

    @classmethod
    def parse(cls, name: str) -> Place | None:
        """The place with this name; None if it is not that of a complete checkpoint."""
        match = _NAME.fullmatch(name)
        place = match and cls(int(match[1]), int(match[2] or 1))
        return place if place and place.name == name else None

    def temporary(self) -> str:
        """A new name for the time before it is complete, or after it has ceased to be."""
        return f"{self.name}.tmp-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Sum:
    """What a file must be."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Sum:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. `owners[name]`, where ranks differ, tells for every rank whose file has its version."""

    step: int
    world: int
    config: Any
    entries: tuple[str, ...]
    files: Mapping[str, Sum]
    owners: Mapping[str, tuple[int, ...]]

    def owner(self, name: str, rank: int) -> int:
        """The rank in whose files `rank` finds the tensor or entry `name`."""
        return self.owners[name][rank] if name in self.owners else 0

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "world": self.world,
            "config": self.config,
            "entries": list(self.entries),
            "owners": {name: list(ranks) for name, ranks in self.owners.items()},
            "files": {name: {"size": own.size, "sha256": own.sha256} for name, own in self.files.items()},
        }
        text = json.dumps(body, indent=1, allow_nan=False).encode()
        return text[:-2] + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest of `to_bytes`, to the byte; ValueError for anything else."""
        match = _SEAL.fullmatch(data)
        if match is None:
            raise ValueError("does not end with its own checksum: cut short, or not a manifest")
        text = match[1] + b"\n}"
        if hashlib.sha256(text).hexdigest() != match[2].decode():
            raise ValueError("its own checksum does not match")
        body = loads(text, deepest=None)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            told = brief(body.get("format")) if isinstance(body, dict) else "unknown"
            raise ValueError(f"format {told}; this version of Phalanx reads format {FORMAT}")
        if odd := [key for key in ("step", "world", "config", "entries", "owners", "files") if key not in body]:
            raise ValueError(f"it has no {odd[0]}")
        return cls(
            step=read_whole(body["step"], "step", 0, LARGEST),
            world=read_whole(body["world"], "world", 1, MAX_WORLD),
            config=read_config(body["config"]),
            entries=read_entries(body["entries"]),
            files={name: Sum(*own) for name, own in read_files(body["files"]).items()},
            owners=read_owners(body["owners"], body["world"]),
        )


def part(rank: int, kind: str) -> str:
    """The name of a file of `rank`: its "json" or its "safetensors"."""
    return f"rank-{rank:05}.{kind}"


# ---- the directory of checkpoints -------------------------------------------------------------------------------------------


def find_places(directory: Path) -> list[Place]:
    """The complete checkpoints in `directory`, newest first; whether they are intact only reading tells."""
    names = [item.name for item in os.scandir(directory) if item.is_dir(follow_symlinks=False)]
    return sorted((place for name in names if (place := Place.parse(name))), reverse=True)


def make_probe(directory: Path) -> str:
    """An empty file in `directory`, which is made if need be, for other ranks to look for; its name."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f".probe-{secrets.token_hex(4)}"
    (directory / name).touch(exist_ok=False)
    return name


def clean(directory: Path) -> None:
    """Delete what a process that was killed has left behind."""
    for item in list(os.scandir(directory)):
        if _PROBE.fullmatch(item.name) and time.time() - item.stat(follow_symlinks=False).st_mtime > PROBE_AGE:
            Path(item.path).unlink(missing_ok=True)
        if _LEFTOVER.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path, ignore_errors=True)


def delete(directory: Path, place: Place) -> None:
    """Delete a checkpoint; whoever is killed meanwhile leaves no half of one under its name."""
    doomed = directory / place.temporary()
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory / place.name, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


# ---- writing: bytes are on the disk when a function returns -----------------------------------------------------------------


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Sum:
    """Write a safetensors file, and return what is in it. The umask decides who may read it, as for all other files."""
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    with open(path, "rb+") as file:
        os.fchmod(file.fileno(), mode)  # the library makes its files for their owner alone
        os.fsync(file.fileno())
    return measure(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file, which appears under its name when all of it is on the disk."""
    fresh = path.with_name(path.name + ".part")
    with opened(path.parent) as directory:  # before the name appears: who waits for it may rename the directory at once
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(fresh, path)
        os.fsync(directory)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with opened(path) as directory:
        os.fsync(directory)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A descriptor of `directory`, whatever its name becomes meanwhile."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def open_regular(path: Path) -> io.FileIO:
    """A file to read from; OSError for a fifo, which would wait for a writer, and for devices, which have no end."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def measure(path: Path) -> Sum:
    """Size and checksum of a file. SHA-256: where the processor has instructions for it it is the fastest of hashlib's."""
    seen, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            seen.update(block)
            size += len(block)
    return Sum(size, seen.hexdigest())


# ---- reading: DamagedError for whatever is not as it was written --------------------------------------------------------------


def read_manifest(directory: Path, place: Place) -> Manifest:
    """The manifest of a checkpoint, after its seal and its step were checked."""
    path = directory / place.name / MANIFEST
    try:
        found = Manifest.from_bytes(_small(path))
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise DamagedError(path, str(error)) from None
    if found.step != place.step:
        raise DamagedError(path, f"is of step {found.step}, in a directory of step {place.step}")
    return found


def check_files(directory: Path, place: Place, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with what the manifest says of them."""
    for name in names:
        path = directory / place.name / name
        wanted = manifest.files.get(name)
        if wanted is None:
            raise DamagedError(path, "the manifest does not know it")
        try:
            size = path.stat().st_size
            found = measure(path) if size == wanted.size else Sum(size, "")
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from None
        if found.size != wanted.size:
            raise DamagedError(path, f"has {found.size} bytes, {wanted.size} were written")
        if found.sha256 != wanted.sha256:
            raise DamagedError(path, "its SHA-256 is not that of what was written")


def read_json(path: Path) -> Any:
    """A JSON file that `check_files` has checked."""
    try:
        return loads(_small(path), deepest=None)
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise DamagedError(path, str(error)) from None


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a file that `check_files` has checked, in memory of their own: the file may be deleted."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in names}
    except (OSError, SafetensorError) as error:
        raise DamagedError(path, str(error)) from None


def _small(path: Path) -> bytes:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_JSON:
            raise ValueError(f"is larger than {LARGEST_JSON} bytes")
        return file.readall()
