"""Groups of Phalanx and of gloo, side by side, for functions that run on the ranks of a pool."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import phalanx.backend
from phalanx.backend import engine

phalanx.backend.register()
warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives; both names must work


@contextlib.contextmanager
def group_of(backend: str, *, per_host: int = 0, seconds: float = 30, **options: Any) -> Iterator[Any]:
    """A group of all ranks. With `per_host`, they believe to be spread over hosts."""
    real = engine.host_key
    if per_host:
        rank = dist.get_rank()
        engine.host_key = lambda: f"host {rank // per_host}"  # type: ignore[assignment]
    try:
        made = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=seconds), **options)
    finally:
        engine.host_key = real
    yield made
    dist.destroy_process_group(made)


@contextlib.contextmanager
def both(**options: Any) -> Iterator[tuple[Any, Any]]:
    """(Phalanx, gloo)."""
    with group_of("phalanx", **options) as ours, group_of("gloo") as theirs:
        yield ours, theirs
