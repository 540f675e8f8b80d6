"""Read and write checkpoint files: writers return when the bytes are on disk, readers raise `DamagedError` if any changed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from phalanx.schedule.plain_json import loads
from phalanx.train.checkpoint.errors import DamagedError
from phalanx.train.checkpoint.manifest import MANIFEST, Manifest, Sum
from phalanx.train.checkpoint.places import CheckpointPlace

BLOCK = 1 << 20  # bytes read at a time
LARGEST_JSON = 1 << 30  # bytes; Phalanx writes no larger ones, and reading one would take that much memory


# ---- writing -------------------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Sum:
    """Write a safetensors file and return its size and checksum. The umask sets its permissions, as for other files."""
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    with open(path, "rb+") as file:
        os.fchmod(file.fileno(), mode)  # safetensors makes files that only their owner can read
        os.fsync(file.fileno())
    return measure(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file, which gets its name when it is completely on disk."""
    fresh = path.with_name(path.name + ".part")
    with opened(path.parent) as directory:  # opened before the name appears: a waiting rank may rename the directory at once
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
    """A descriptor of `directory`, which stays valid if the directory is renamed."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read. OSError for a fifo, which would block, and for a device, which may be endless."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def measure(path: Path) -> Sum:
    """Size and SHA-256 of a file. It is hashlib's fastest hash on processors with SHA instructions."""
    seen, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            seen.update(block)
            size += len(block)
    return Sum(size, seen.hexdigest())


# ---- reading -------------------------------------------------------------------------------------------------------------------


def read_manifest(directory: Path, place: CheckpointPlace) -> Manifest:
    """Read the manifest of a checkpoint, and check its seal and its step."""
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


def check_files(directory: Path, place: CheckpointPlace, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with the manifest."""
    for name in names:
        path = directory / place.name / name
        wanted = manifest.files.get(name)
        if wanted is None:
            raise DamagedError(path, "the manifest does not list it")
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
    """Read a JSON file that `check_files` has checked."""
    try:
        return loads(_small(path), deepest=None)
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise DamagedError(path, str(error)) from None


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors of a file that `check_files` has checked. They are copies, so the file may be deleted."""
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
