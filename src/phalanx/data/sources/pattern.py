"""Patterns of shards: `train-{000..099}.tar`, `{a,b}/*.tar`, `{split}-*.tar` become lists of files."""

from __future__ import annotations

import glob
import itertools
import os
import re

from phalanx.data.source import HELD_OUT, SourceError

MAX_FILES = 100_000  # a typo such as {0..1000000000} would fill the memory
BRACES = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}", re.ASCII)


def expand(pattern: str) -> list[str]:
    """Expand all braces: numbers with as many digits as the first, or words."""
    pieces: list[list[str]] = []
    end = 0
    for found in BRACES.finditer(pattern):
        pieces.append([pattern[end : found.start()]])
        if found[3] is not None:
            pieces.append(found[3].split(","))
        else:
            first, last = int(found[1]), int(found[2])
            if last < first or last - first >= MAX_FILES:
                raise SourceError(f"shards:{pattern}: {found[0]} are not 1 to {MAX_FILES} numbers, the smaller first")
            pieces.append([str(number).zfill(len(found[1])) for number in range(first, last + 1)])
        end = found.end()
    pieces.append([pattern[end:]])
    count = 1
    for piece in pieces:
        count *= len(piece)
    if count > MAX_FILES:
        raise SourceError(f"shards:{pattern}: {count} files; at most {MAX_FILES}")
    return ["".join(parts) for parts in itertools.product(*pieces)]


def find_files(pattern: str, split: str) -> list[str]:
    """Find the files of a pattern in order, each once. Files listed by braces must exist; a glob takes what it finds.

    `{split}` is the name of the split or, for held-out data, the first of its names that has files.
    """
    spec = f"shards:{pattern}"
    if "{split}" in pattern:
        names = ["train"] if split == "train" else [split, *(name for name in HELD_OUT if name != split)]
    elif split == "train":
        names = [""]
    else:
        raise SourceError(f"{spec}: which of them are held out? Write {{split}} where their names say train or val")
    for name in names:
        found: dict[str, None] = {}
        for path in expand(os.path.expanduser(pattern.replace("{split}", name))):
            found.update(dict.fromkeys(sorted(glob.glob(path)) if glob.has_magic(path) else [path]))
        missing = [path for path in found if not os.path.isfile(path)]
        if found and not missing:
            return list(found)
        if len(missing) < len(found):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SourceError(f"{spec}: of {len(found)} files {missing[0]}{more} missing: fetch them, or narrow the pattern")
    tried = f" ({{split}} was tried as {', '.join(names)})" if names[0] else ""
    raise SourceError(f"{spec}: no such file{tried}: check directory and pattern, and quote it from the shell")
