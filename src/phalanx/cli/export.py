"""`phalanx export`: the model of a checkpoint as a plain PyTorch state dict."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.numbers import whole
from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError

if TYPE_CHECKING:
    from phalanx.train.checkpoint.places import CheckpointPlace

ENTRY = "model"

EXAMPLES = """examples:
  phalanx export run model.pt                        the newest intact checkpoint of a run
  phalanx export run/checkpoints/step-000000120 model.pt
  phalanx export run model.pt --rank 3               the replica of rank 3, of a run with gossip

then, without Phalanx:
  model.load_state_dict(torch.load("model.pt", weights_only=True))
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make `export` known to the command line."""
    parser = verbs.add_parser(
        "export",
        help="write the model of a checkpoint as a plain PyTorch file",
        description="Write the `model` entry of a checkpoint as a state dict that torch.load(weights_only=True) reads.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run, its directory of checkpoints, or one checkpoint")
    parser.add_argument("file", metavar="FILE", type=Path, help="file to write")
    parser.add_argument("--rank", metavar="N", type=whole(0), default=0, help="the rank whose replica to write (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the newest intact checkpoint, and write its model whole or not at all."""
    import torch  # here: other verbs do without it

    from phalanx.train.checkpoint.errors import DamagedError
    from phalanx.train.checkpoint.read import read

    if args.file.exists() and not args.file.is_file():  # root would replace /dev/null
        raise UsageError(f"{args.file} exists and is not a regular file: name another one")
    directory, places = _find(args.directory)
    for place in places:
        try:
            reading = read(directory, place, [ENTRY], args.rank)
        except DamagedError as error:
            tell(f"damaged: {error}")
            continue
        manifest = reading.manifest
        if not 0 <= args.rank < manifest.world:
            raise UsageError(f"--rank {args.rank}: {place.name} was saved by ranks 0 to {manifest.world - 1}")
        if ENTRY not in reading.saved:
            raise UsageError(f"{place.name} has no {ENTRY!r}; it has {', '.join(manifest.entries)}")
        fresh = args.file.with_name(args.file.name + ".part")
        try:
            torch.save(reading.saved[ENTRY].value, fresh)
            os.replace(fresh, args.file)
        except (OSError, RuntimeError) as error:  # torch wraps errors of the system
            fresh.unlink(missing_ok=True)
            tell(f"cannot write {args.file}: {error}")
            return 1
        print(f"{args.file}: the model of {place.name}, rank {args.rank} of {manifest.world}")
        return 0
    tell(f"every checkpoint in {directory} is damaged")
    return 1


def _find(path: Path) -> tuple[Path, list[CheckpointPlace]]:
    """The directory of checkpoints at or below `path`, and the checkpoints to try, newest first."""
    from phalanx.train.checkpoint.places import CheckpointPlace, find_places

    place = CheckpointPlace.parse(path.absolute().name)
    if place is not None and path.is_dir():
        return path.absolute().parent, [place]
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        places = find_places(directory)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not places:
        raise UsageError(f"{path}: there is no checkpoint")
    return directory, places
