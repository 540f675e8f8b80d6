"""Write a `torch.distributed.checkpoint` directory with torch's writer, in one process, renamed when complete."""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from phalanx.train.checkpoint.errors import CheckpointError, explain

ALONE = "no_dist" in inspect.signature(dcp.save).parameters  # since torch 2.7; older versions ask whether there is a group


def write_dcp(directory: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts and lists of tensors and plain values. CheckpointError if that fails, or would overwrite something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty: name another directory")
    if not ALONE and dist.is_initialized():
        raise CheckpointError("this version of torch can write only where there is no process group: use torch 2.7 or newer")
    fresh = directory.with_name(f".{directory.name}.part-{os.getpid()}")
    options: dict[str, Any] = {"no_dist": True} if ALONE else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # writing alone is intended
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(fresh), **options)
        if directory.is_dir():
            directory.rmdir()
        fresh.rename(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {explain(error)}") from None
    except dcp.CheckpointException as error:  # torch wraps errors of the system
        causes = "; ".join(str(cause[0] if isinstance(cause, tuple) else cause) for cause in error.failures.values())
        raise CheckpointError(f"cannot write {directory}: {causes}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
