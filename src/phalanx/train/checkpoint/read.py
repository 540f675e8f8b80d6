"""Read one rank's part of a checkpoint, for a world of any size, and check every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.schedule.plain_json import brief
from phalanx.train.checkpoint.entries import SavedEntry, check_saved
from phalanx.train.checkpoint.errors import DamagedError
from phalanx.train.checkpoint.files import check_files, read_json, read_manifest, read_tensors
from phalanx.train.checkpoint.manifest import Manifest, part
from phalanx.train.checkpoint.places import CheckpointPlace
from phalanx.train.checkpoint.replicas import structure_of
from phalanx.train.checkpoint.tree import Tensors, decode, references


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint as one rank reads it. Rank r of another world takes what rank r modulo the saved world size saved."""

    manifest: Manifest
    saved: Mapping[str, SavedEntry]

    def versions(self, entry: str) -> int:
        """How many versions of an entry were saved; 1 if no rank differed from rank 0."""
        names = [name for name in self.manifest.owners if name == entry or name.startswith((f"{entry}/", structure_of(entry)))]
        return max((len(set(self.manifest.owners[name])) for name in names), default=1)


def read(directory: Path, place: CheckpointPlace, entries: Iterable[str], rank: int = 0, size: int = 1) -> Reading:
    """Read those of `entries` that exist. DamagedError names the file and what is wrong with it.

    Together, the `size` ranks check all files, including those of other entries.
    """
    manifest = read_manifest(directory, place)
    wanted = [name for name in entries if name in manifest.entries]
    folder, me = directory / place.name, rank % manifest.world
    checked: set[str] = set()

    def check(names: Iterable[str]) -> None:
        check_files(directory, place, manifest, [name for name in names if name not in checked])
        checked.update(names)

    check(sorted(manifest.files)[rank % size :: size])
    owners = {name: part(manifest.owner(structure_of(name), me), "json") for name in wanted}
    check(sorted(set(owners.values())))
    structures = {file: read_json(folder / file) for file in sorted(set(owners.values()))}
    found = {name: _entry(structures[file], name, folder / file) for name, file in owners.items()}
    names = set().union(*(references(own["tree"]) for own in found.values()))
    tensors = _read_tensors(folder, manifest, me, names, check)
    return Reading(manifest, {name: _decoded(own, tensors, name, folder / owners[name]) for name, own in found.items()})


def _decoded(own: dict[str, Any], tensors: Tensors, name: str, file: Path) -> SavedEntry:
    try:
        return check_saved(SavedEntry(own["kind"], decode(own["tree"], tensors), tuple(map(tuple, own["shapes"]))))
    except ValueError as error:
        raise DamagedError(file, f"{name} is malformed: {error}") from None


def _entry(structure: Any, name: str, file: Path) -> dict[str, Any]:
    """What a rank wrote for an entry: its kind, tree and shapes."""
    entries = structure.get("entries") if isinstance(structure, dict) else None
    own = entries.get(name) if isinstance(entries, dict) else None
    if not isinstance(own, dict) or "tree" not in own or not isinstance(own.get("kind"), str):
        raise DamagedError(file, f"it has no {name} with a kind and a tree")
    shapes = own.get("shapes")
    if not isinstance(shapes, list) or not all(isinstance(s, list) and all(type(n) is int for n in s) for s in shapes):
        raise DamagedError(file, f"the shapes of {name} are {brief(shapes)}")
    return own


def _read_tensors(folder: Path, manifest: Manifest, me: int, names: set[str], check: Callable[[list[str]], None]) -> Tensors:
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        files.setdefault(part(manifest.owner(name, me), "safetensors"), []).append(name)
    check(list(files))
    found: Tensors = {}
    for file, own in files.items():
        found |= read_tensors(folder / file, own)
    return found
