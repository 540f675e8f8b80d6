"""The directory of a run of `phalanx train`: a new one, or that of an earlier start of the same run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.usage import UsageError
from phalanx.schedule.plain_json import loads
from phalanx.train.rows import write_json

if TYPE_CHECKING:  # torch takes seconds to import, and `phalanx --help` does not need it
    from phalanx.comm.communicator import Communicator
    from phalanx.train.config import RunConfig

RUNS = Path("runs")


def prepare_directory(out: Path | None, config: RunConfig, *, resume: bool) -> Path:
    """Create the directory of a run, or find the one of an earlier start of the same run to resume.

    With `resume`, an `out` without a run gets a new one, because a requeued job has the same command line for all starts.
    DirectoryInUseError if another job uses it.
    """
    from phalanx.train.checkpoint.lock import DirectoryLock
    from phalanx.train.checkpoint.places import find_places
    from phalanx.train.config import plain

    try:
        if out is None:
            out = newest_run(config.name) if resume else new_run(config.name)
        out.mkdir(parents=True, exist_ok=True)
        with DirectoryLock(out):
            if resume and (out / "config.json").exists():
                check_same_run(out, config)
                return out
            if (out / "checkpoints").is_dir() and find_places(out / "checkpoints"):
                raise UsageError(
                    f"{out} has checkpoints, but no config.json that names their run: use another directory with --out"
                    if resume
                    else f"{out} has checkpoints of an earlier run: continue it with --resume, or name another directory"
                )
            write_json(out / "config.json", plain(config))
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"--out {out or RUNS / config.name}: {reason}") from None
    return out


def agree_on_directory(out: Path | None, config: RunConfig, comm: Communicator, *, resume: bool) -> Path:
    """Prepare the directory on rank 0 and send it to all ranks: a second rank would find it existing."""
    from phalanx.train.checkpoint import DirectoryInUseError

    path, problem, in_use = "", "", ""
    if comm.rank == 0:
        try:
            path = str(prepare_directory(out, config, resume=resume))
        except UsageError as error:
            problem = str(error)
        except DirectoryInUseError as error:
            in_use = str(error)
    path, problem, in_use = comm.bcast_obj((path, problem, in_use))
    if problem:
        raise UsageError(problem)
    if in_use:
        raise DirectoryInUseError(in_use)
    return Path(path)


def new_run(name: str) -> Path:
    """Create the first directory of this name that does not exist. Two jobs that start at the same time get one each."""
    RUNS.mkdir(parents=True, exist_ok=True)
    for path in numbered(name):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def newest_run(name: str) -> Path:
    """The most recently changed directory of this name."""
    taken = list(itertools.takewhile(Path.exists, numbered(name)))
    if not taken:
        raise UsageError(f"nothing to resume: there is no {RUNS / name}; with --out DIR, --resume starts a run if there is none")
    return max(taken, key=lambda path: path.stat().st_mtime)


def numbered(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3, ..."""
    return (RUNS / (f"{name}-{i}" if i > 1 else name) for i in itertools.count(1))


def check_same_run(out: Path, config: RunConfig) -> None:
    """Raise unless the run in `out` has this configuration."""
    from phalanx.train.checkpoint.differences import compare_plain
    from phalanx.train.config import identity, plain

    try:
        before = loads((out / "config.json").read_text(encoding="utf-8"))
        odd = compare_plain("config", identity(json.loads(json.dumps(plain(config)))), identity(before))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"nothing to resume in {out}: its config.json is not that of a run; use another directory with --out"
        ) from None
    if odd:
        raise UsageError(f"{out} is a run with other settings, which cannot be resumed with these: {'; '.join(odd)}")
