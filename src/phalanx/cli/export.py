"""`phalanx export`: the model of a checkpoint in a format that other programs read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.numbers import whole
from phalanx.cli.terminal import tell
from phalanx.cli.usage import UsageError

if TYPE_CHECKING:
    from phalanx.train.checkpoint.places import CheckpointPlace
    from phalanx.train.checkpoint.read import Reading

ENTRY = "model"
MORE = ("optimizer", "position")  # further entries for torch.distributed.checkpoint, if the checkpoint has them

EXAMPLES = """examples:
  phalanx export run model.pt                        the newest intact checkpoint of a run, for torch.load
  phalanx export run model.safetensors               the same for safetensors, Hugging Face and others
  phalanx export run --dcp DIR                       model, optimizer and position for torch.distributed.checkpoint
  phalanx export run/checkpoints/step-000000120 model.pt
  phalanx export run model.pt --rank 3               the replica of rank 3, of a run with gossip

then, without Phalanx:
  model.load_state_dict(torch.load("model.pt", weights_only=True))
  model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
  state = {"model": model.state_dict()}; torch.distributed.checkpoint.load(state, checkpoint_id="DIR")
"""


def add_to(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `export` to the command line."""
    parser = verbs.add_parser(
        "export",
        help="write the model of a checkpoint for other programs",
        description="Write the `model` entry of a checkpoint as a state dict: a PyTorch file, or safetensors if FILE ends with "
        ".safetensors. With --dcp, write a directory of torch.distributed.checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run, its directory of checkpoints, or one checkpoint")
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="file to write")
    parser.add_argument("--dcp", metavar="DIR", type=Path, help="directory of torch.distributed.checkpoint to write")
    parser.add_argument("--rank", metavar="N", type=whole(0), default=0, help="the rank whose replica to write (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the newest intact checkpoint, and write its model atomically."""
    if (args.file is None) == (args.dcp is None):
        raise UsageError("name a FILE to write, or a directory with --dcp DIR")
    if args.file is not None and args.file.exists() and not args.file.is_file():  # as root, it would replace /dev/null
        raise UsageError(f"{args.file} exists and is not a regular file: name another one")
    from phalanx.train.checkpoint.errors import CheckpointError, DamagedError
    from phalanx.train.checkpoint.places import find_checkpoints
    from phalanx.train.checkpoint.read import read

    try:
        directory, places = find_checkpoints(args.directory)
    except CheckpointError as error:
        raise UsageError(f"{args.directory}: {error}") from None
    for place in places:
        try:
            reading = read(directory, place, [ENTRY, *(MORE if args.dcp else ())], args.rank)
        except DamagedError as error:
            tell(f"damaged: {error}")
            continue
        return write(args, place, reading)
    tell(f"every checkpoint in {directory} is damaged")
    return 1


def write(args: argparse.Namespace, place: CheckpointPlace, reading: Reading) -> int:
    """Write the requested file or directory, and print its path."""
    from phalanx.train.checkpoint.errors import CheckpointError

    manifest = reading.manifest
    if not 0 <= args.rank < manifest.world:
        raise UsageError(f"--rank {args.rank}: {place.name} was saved by ranks 0 to {manifest.world - 1}")
    if ENTRY not in reading.saved:
        raise UsageError(f"{place.name} has no {ENTRY!r}; it has {', '.join(manifest.entries)}")
    target = args.dcp or args.file
    try:
        if args.dcp:
            write_directory(args.dcp, reading)
        else:
            write_file(args.file, reading.saved[ENTRY].value)
    except (CheckpointError, OSError, RuntimeError) as error:  # torch wraps errors of the system
        tell(error if isinstance(error, CheckpointError) else f"cannot write {target}: {error}")
        return 1
    print(f"{target}: the {', '.join(reading.saved)} of {place.name}, rank {args.rank} of {manifest.world}")
    return 0


def write_file(path: Path, model: dict[str, Any]) -> None:
    """Write a state dict in the format of the file's suffix. The file gets its name when it is complete."""
    import torch  # here, because other verbs do not need it

    from phalanx.train.checkpoint.files import write_tensors

    fresh = path.with_name(path.name + ".part")
    try:
        if path.suffix == ".safetensors":
            odd = [name for name, own in model.items() if not isinstance(own, torch.Tensor)]
            if odd:
                raise UsageError(f"{path}: safetensors holds only tensors, but {odd[0]} is not one: write a .pt file")
            # tensors that share memory, such as tied weights, are stored once each: the format cannot share them
            write_tensors(fresh, {name: own.contiguous().clone() for name, own in model.items()}, {"format": "pt"})
        else:
            torch.save(model, fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_directory(path: Path, reading: Reading) -> None:
    """Write model, optimizer and position. Optimizer state refers to parameters by name, as in torch's get_state_dict."""
    from phalanx.train.checkpoint.dcp import optimizer_by_name
    from phalanx.train.checkpoint.dcp_write import write_dcp

    state = {name: entry.value for name, entry in reading.saved.items()}
    if reading.saved.get("optimizer") is not None and reading.saved["optimizer"].kind == "optimizer":
        state["optimizer"] = optimizer_by_name(state["optimizer"])
    write_dcp(path, state)
