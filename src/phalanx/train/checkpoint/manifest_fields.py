"""Check a manifest's fields: its seal proves that it is unchanged, not that it was ever valid."""

from __future__ import annotations

import re
from typing import Any

from phalanx.schedule.plain_json import brief, read_whole
from phalanx.train.checkpoint.tree import decode

LARGEST = 1 << 60  # of a step, or a size in bytes
MAX_WORLD = 1 << 20  # ranks that saved together
_PART = re.compile(r"rank-\d{5,}\.(?:json|safetensors)", re.ASCII)


def read_config(config: Any) -> Any:
    """The configuration, if its tree can be decoded."""
    decode(config, {})
    return config


def read_entries(names: Any) -> tuple[str, ...]:
    """The names of what was saved."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"entries are {brief(names)}; a list of names")
    return tuple(names)


def read_files(files: Any) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every part, by its name."""
    if not isinstance(files, dict):
        raise ValueError(f"files are {brief(files)}; sizes and checksums by name")
    found = {}
    for name, own in files.items():
        if not _PART.fullmatch(name):
            raise ValueError(f"{brief(name)} is not the name of a part")
        size, sha256 = (own.get(key) for key in ("size", "sha256")) if isinstance(own, dict) else (None, None)
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"the SHA-256 of {brief(name)} is {brief(sha256)}")
        found[name] = read_whole(size, f"the size of {brief(name)}", 0, LARGEST), sha256
    return found


def read_owners(owners: Any, world: int) -> dict[str, tuple[int, ...]]:
    """For every name with several versions, the rank whose version each rank has."""
    if not isinstance(owners, dict):
        raise ValueError(f"owners are {brief(owners)}; ranks by name")
    for name, ranks in owners.items():
        if (
            not isinstance(ranks, list)
            or len(ranks) != world
            or not all(type(rank) is int and 0 <= rank < world for rank in ranks)
        ):
            raise ValueError(f"the owners of {brief(name)} are not {world} ranks")
    return {name: tuple(ranks) for name, ranks in owners.items()}
