"""The manifest of a checkpoint: its contents, and the size and SHA-256 of every file, sealed by its own checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.schedule.plain_json import brief, loads, read_whole
from phalanx.train.checkpoint.manifest_fields import LARGEST, MAX_WORLD, read_config, read_entries, read_files, read_owners

FORMAT = 1
MANIFEST = "manifest.json"
_SEAL = re.compile(rb'(.*),\n "sha256": "([0-9a-f]{64})"\n}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sum:
    """The expected size and checksum of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Sum:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. If ranks differ, `owners[name]` lists, per rank, the rank whose file has its version."""

    step: int
    world: int
    config: Any
    entries: tuple[str, ...]
    files: Mapping[str, Sum]
    owners: Mapping[str, tuple[int, ...]]

    def owner(self, name: str, rank: int) -> int:
        """The rank whose files hold the tensor or entry `name` of `rank`."""
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
        """Parse what `to_bytes` wrote. ValueError if a single byte differs."""
        match = _SEAL.fullmatch(data)
        if match is None:
            raise ValueError("does not end with its own checksum: cut short, or not a manifest")
        text = match[1] + b"\n}"
        if hashlib.sha256(text).hexdigest() != match[2].decode():
            raise ValueError("its own checksum does not match")
        body = loads(text, deepest=None)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = brief(body.get("format")) if isinstance(body, dict) else "unknown"
            raise ValueError(f"format {found}; this version of Phalanx reads format {FORMAT}")
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
