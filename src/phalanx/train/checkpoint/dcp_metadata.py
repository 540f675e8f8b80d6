"""Read the `.metadata` pickle of a `torch.distributed.checkpoint` directory without Python's unpickler.

torch's own reader unpickles the file, so an untrusted directory can run code. Here its objects become `Record`s: a name, and
its contents. Nothing is imported or called, and only names that torch writes are accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.data.sources.plain_pickle import Budget, PickleRefused, Vocabulary, load_plain

FILE = ".metadata"
OWN = "torch.distributed.checkpoint."
NAMES = frozenset(
    {"torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"}
    | {f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath", "PurePosixPath")}
)
MAX_DIMS = 64  # of a tensor
LARGEST = 1 << 62  # of a size, an offset or a length


@dataclass(eq=False, slots=True)  # compared by identity, so that its hash is cheap
class Record:
    """An object of the pickle."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A class or function by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of a file in the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in chunks, which may be in the files of different ranks."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """The contents of a directory by flat names: tensors, other values, and each name's path in the nested state."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]


def parse_metadata(data: bytes) -> Contents:
    """Parse a `.metadata` file. ValueError says what is wrong with it."""
    root = _record(load_plain(data, WORDS), "metadata.Metadata")
    places = _places(root.state.get("storage_data"))
    budget = Budget(len(data))  # a list of chunks in the memo may be referenced many times
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Place] = {}
    for name, entry in _dict(root.state.get("state_dict_metadata")).items():
        own = places.get(_text(name), {})
        kind = _record(entry, "")
        if kind.name == f"{OWN}metadata.BytesStorageMetadata":
            values[name] = _only(own, name)
        else:
            tensors[name] = _tensor(_record(entry, "metadata.TensorStorageMetadata"), own, name, budget)
    return Contents(tensors, values, _paths(root.state.get("planner_data"), [*tensors, *values]))


# ---- the pickle ----------------------------------------------------------------------------------------------------------------


def _known(name: str) -> Named:
    head, _, last = name.rpartition(".")
    is_dtype = head == "torch" and isinstance(getattr(torch, last, None), torch.dtype)
    if not (is_dtype or name in NAMES or name.startswith(OWN)):
        raise PickleRefused(f"it names {name[:100]}, which no checkpoint needs")
    return Named(name)


def _call(function: Any, arguments: tuple[Any, ...], room: Budget) -> Record:
    if not isinstance(function, Named):
        raise TypeError("a call of something that is not a function")
    return Record(function.name, arguments)


def _build(owner: Any, state: Any) -> None:
    """Set the state of a record: a dict, or for torch's TensorProperties a tuple that starts with the dtype."""
    if not isinstance(owner, Record):
        raise TypeError("a state for something that has none")
    if isinstance(state, tuple):
        state = state[1] if len(state) == 2 and isinstance(state[1], dict) else {"tuple": state}
    owner.state = _dict(state)


WORDS = Vocabulary(_known, _call, _build, (str, Record))


# ---- its parts -----------------------------------------------------------------------------------------------------------------


def _places(storage: Any) -> dict[str, dict[tuple[int, ...] | None, Place]]:
    """Where the bytes of each chunk are, by entry name and chunk offsets (None if it is not a tensor)."""
    found: dict[str, dict[tuple[int, ...] | None, Place]] = {}
    for key, value in _dict(storage).items():
        index, info = _record(key, "metadata.MetadataIndex").state, _record(value, "filesystem._StorageInfo").state
        if info.get("transform_descriptors"):
            raise ValueError("it is compressed, which is not read here: save it without extensions, or load it with torch")
        offset = None if index.get("offset") is None else _sizes(index["offset"])
        file = _text(info.get("relative_path"))
        if "/" in file or file in ("", ".", ".."):
            raise ValueError(f"a file outside of the directory: {file[:100]!r}")
        place = Place(file, _size(info.get("offset")), _size(info.get("length")))
        found.setdefault(_text(index.get("fqn")), {})[offset] = place
    return found


def _tensor(entry: Record, places: dict[tuple[int, ...] | None, Place], name: str, budget: Budget) -> StoredTensor:
    properties = _record(entry.state.get("properties"), "metadata.TensorProperties").state.get("tuple")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Named) or not isinstance(kind := getattr(torch, dtype.name.rpartition(".")[2], None), torch.dtype):
        raise ValueError(f"{name[:100]}: no dtype")
    size = _sizes(entry.state.get("size"))
    chunks = entry.state.get("chunks")
    if not isinstance(chunks, list):
        raise ValueError(f"{name[:100]}: no list of chunks")
    budget.take(len(chunks))
    return StoredTensor(kind, size, tuple(_chunk(chunk, size, places, name) for chunk in chunks))


def _chunk(entry: Any, size: tuple[int, ...], places: dict[tuple[int, ...] | None, Place], name: str) -> Chunk:
    state = _record(entry, "metadata.ChunkStorageMetadata").state
    offsets, sizes = _sizes(state.get("offsets")), _sizes(state.get("sizes"))
    if len(offsets) != len(size) or len(sizes) != len(size) or any(o + s > n for o, s, n in zip(offsets, sizes, size)):
        raise ValueError(f"{name[:100]}: a chunk of {sizes} at {offsets} in a tensor of {size}")
    if offsets not in places:
        raise ValueError(f"{name[:100]}: no file holds its chunk at {offsets}")
    return Chunk(offsets, sizes, places[offsets])


def _only(places: dict[tuple[int, ...] | None, Place], name: str) -> Place:
    if len(places) != 1:
        raise ValueError(f"{name[:100]}: it is in {len(places)} places")
    return next(iter(places.values()))


def _paths(planned: Any, names: list[str]) -> dict[str, tuple[str | int, ...]]:
    """The paths that torch recorded. A name without one is its own path."""
    noted = planned if isinstance(planned, dict) else {}
    found: dict[str, tuple[str | int, ...]] = {}
    for name in names:
        path = noted.get(name, (name,))
        if not isinstance(path, tuple) or not 0 < len(path) <= MAX_DIMS or not all(type(part) in (str, int) for part in path):
            raise ValueError(f"{name[:100]}: its path is none")
        found[name] = path
    return found


def _record(value: Any, name: str) -> Record:
    if not isinstance(value, Record) or (name and value.name != OWN + name):
        raise ValueError(f"no {name or 'object'} where there should be one")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where there should be a dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where there should be a text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("a number that is not a size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = value.arguments[0] if isinstance(value, Record) and value.name == "torch.Size" and value.arguments else None
    if not isinstance(sizes, tuple) or len(sizes) > MAX_DIMS:
        raise ValueError("no torch.Size where there should be one")
    return tuple(_size(size) for size in sizes)
