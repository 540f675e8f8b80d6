"""Rows on disk, one JSON object per line. Readers see only whole lines, even if the writer was killed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from phalanx.schedule.plain_json import loads


class Rows:
    """Appends to `path`; with `keep_to_step`, rows of earlier starts are kept up to that step and deleted beyond it.

    A run that resumes at step 100 repeats step 101 and later ones, so their earlier rows, and the end of the run, are obsolete.
    """

    def __init__(self, path: Path, *, keep_to_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if keep_to_step is None else [row for row in read_rows(path) if _happened(row, keep_to_step)]
        _write_whole(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(_line(row))

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all whole rows. Half-written lines of a killed process, and lines not written by `Rows`, are skipped."""
    if not path.is_file():  # a fifo would block
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, json.dumps(_finite(value), indent=2) + "\n")


def _happened(row: dict[str, Any], step: int) -> bool:
    at = row.get("step", 0)
    return row.get("kind") != "end" and not (isinstance(at, int | float) and at > step)


def _write_whole(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_finite(row)) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
