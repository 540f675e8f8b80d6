"""Read a `torch.distributed.checkpoint` directory from any number of ranks, without running code from it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any

import torch

from phalanx.train.checkpoint.dcp_metadata import FILE, Contents, Place, StoredTensor, parse_metadata
from phalanx.train.checkpoint.errors import CheckpointError, DamagedError
from phalanx.train.checkpoint.files import open_regular

LARGEST = 1 << 30  # bytes of metadata


def is_dcp(path: Path) -> bool:
    """Whether `path` is such a directory."""
    return (path / FILE).is_file()


def read_dcp(directory: str | os.PathLike[str], *entries: str) -> dict[str, Any]:
    """Read a directory that `torch.distributed.checkpoint.save` or `save_dcp` wrote, from any number of ranks.

    Tensors are assembled on the CPU, with the saved bits. torch's own reader unpickles the directory's metadata, which
    runs code; this one does not.

    Args:
        directory: The directory.
        *entries: What to read of its top level, such as "model"; everything by default.

    Returns:
        The nested state. torch writes the keys of dicts as text, so an optimizer's parameter 0 is "0" here.

    Raises:
        CheckpointError: If it is not such a directory, is damaged, or holds Python objects.

    Example:
        >>> import tempfile, torch
        >>> from phalanx.train.checkpoint.dcp import read_dcp, save_dcp
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_dcp(f"{directory}/saved", model=torch.nn.Linear(2, 1), progress={"step": 120})
        ...     state = read_dcp(f"{directory}/saved")
        >>> state["model"]["weight"].shape, state["progress"]
        (torch.Size([1, 2]), {'step': 120})
    """
    path = Path(directory)
    contents = _contents(path)
    chosen = {name: own for name, own in contents.paths.items() if not entries or own[0] in entries}
    if missing := [entry for entry in entries if not any(own[0] == entry for own in chosen.values())]:
        there = ", ".join(sorted({str(own[0]) for own in contents.paths.values()})[:20])
        raise CheckpointError(f"{path} has no {', '.join(missing)}; it has {there}")
    files: dict[str, IO[bytes]] = {}
    try:
        found = {name: _value(path, name, contents, files) for name in chosen}
    finally:
        for file in files.values():
            file.close()
    return _nest({name: (chosen[name], value) for name, value in found.items()})


def _contents(path: Path) -> Contents:
    file = path / FILE
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > LARGEST:
                raise DamagedError(file, f"is larger than {LARGEST} bytes")
            return parse_metadata(opened.readall())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a directory of torch.distributed.checkpoint: it has no {FILE}") from None
    except OSError as error:
        raise DamagedError(file, error.strerror or str(error)) from None
    except ValueError as error:
        raise DamagedError(file, str(error)) from None


def _value(path: Path, name: str, contents: Contents, files: dict[str, IO[bytes]]) -> Any:
    if name in contents.values:
        return _load(path, contents.values[name], files, name)
    return _tensor(path, contents.tensors[name], files, name)


def _tensor(path: Path, stored: StoredTensor, files: dict[str, IO[bytes]], name: str) -> torch.Tensor:
    """Assemble the chunks of a tensor. Each must fit its file, so a wrong size cannot allocate unlimited memory."""
    counts = [torch.Size(chunk.sizes).numel() for chunk in stored.chunks]
    for chunk, count in zip(stored.chunks, counts):
        if count * stored.dtype.itemsize > chunk.place.length:
            raise DamagedError(path / chunk.place.file, f"{name}: {chunk.place.length} bytes for a chunk of {chunk.sizes}")
    if sum(counts) != torch.Size(stored.size).numel() or len({chunk.offsets for chunk in stored.chunks}) != len(stored.chunks):
        raise DamagedError(path / FILE, f"{name}: its chunks do not make up a tensor of {stored.size}")
    pieces = [_piece(path, chunk.place, chunk.sizes, stored.dtype, files, name) for chunk in stored.chunks]
    if len(pieces) == 1:
        return pieces[0]
    whole = torch.empty(stored.size, dtype=stored.dtype)
    for chunk, piece in zip(stored.chunks, pieces):
        if piece.numel():
            whole[tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes))] = piece
    return whole


def _piece(
    path: Path, place: Place, sizes: tuple[int, ...], dtype: torch.dtype, files: dict[str, IO[bytes]], name: str
) -> torch.Tensor:
    found = _load(path, place, files, name)
    if (
        type(found) is not torch.Tensor
        or found.layout is not torch.strided
        or found.dtype != dtype
        or tuple(found.shape) != sizes
    ):
        raise DamagedError(path / place.file, f"{name}: it does not hold a dense tensor of {sizes} and {dtype}")
    return found.detach()


def _load(path: Path, place: Place, files: dict[str, IO[bytes]], name: str) -> Any:
    """Load what torch.save wrote, with torch's restricted unpickler: only tensors and plain values."""
    file = path / place.file
    try:
        if place.file not in files:
            files[place.file] = open_regular(file)
        opened = files[place.file]
        if place.offset + place.length > os.fstat(opened.fileno()).st_size:
            raise DamagedError(file, f"{name}: it ends before byte {place.offset + place.length}")
        opened.seek(place.offset)
        return torch.load(io.BytesIO(opened.read(place.length)), map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamagedError(file, error.strerror or str(error)) from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  what torch raises for nonsense is not documented
        reason = str(error).strip().split("\n")[0][:200]
        raise DamagedError(file, f"{name}: neither a tensor nor plain data: {reason}") from None


def _nest(found: dict[str, tuple[tuple[str | int, ...], Any]]) -> dict[str, Any]:
    """Build the nested state from paths: a text is a dict key, a number a list index."""
    root: dict[Any, Any] = {}
    lists: set[tuple[str | int, ...]] = set()  # the paths below which there are numbers
    for name, (path, value) in found.items():
        level = root
        for depth, part in enumerate(path[:-1], start=1):
            if isinstance(path[depth], int):
                lists.add(path[:depth])
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise CheckpointError(f"{name}: two entries have this name")
        level[path[-1]] = value
    for path in sorted(lists, key=len, reverse=True):
        level = root
        for part in path[:-1]:
            level = level[part]
        level[path[-1]] = [level[path[-1]][key] for key in sorted(level[path[-1]], key=lambda key: (isinstance(key, str), key))]
    return root
