"""What the loader's options may be together; each function returns what it checked."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch.utils.data import TensorDataset

from phalanx.data.assemble import Decode, Maker
from phalanx.data.scatter import Ranked, Shard
from phalanx.data.source import Encoded
from phalanx.data.workers import Kind


def checked_source(source: Any, decode: Decode | None, comm: Ranked) -> Any:
    """The source; a `TensorDataset` as its tensors, which are taken at once."""
    if isinstance(source, Shard) and comm.size > 1:
        raise ValueError("a Shard is one rank's share already: give the Loader the whole data set, it shares out every batch")
    if isinstance(source, Encoded) and decode is None:
        raise ValueError(
            "this source has encoded images: pass decode=, e.g. RandomResizedCrop(224) or CentreCrop(224, resize=256)"
        )
    if decode is not None and not isinstance(source, Encoded):
        raise ValueError(f"decode= is for sources of encoded images, not for {type(source).__name__}: pass transform= instead")
    return source.tensors if type(source) is TensorDataset else source


def checked_kind(kind: Kind, maker: Maker) -> Kind:
    """Threads or processes."""
    if one_of("kind", kind, Kind) == "process" and maker.takes_at_once:
        raise ValueError(
            "kind='process' would copy data in memory to every process: use kind='thread', which takes them in one step"
        )
    return kind


def checked_pin(pin_memory: bool | None) -> bool:
    """Whether to pin."""
    available = torch.accelerator.is_available()
    if pin_memory and not available:
        raise ValueError("pin_memory=True, but there is no accelerator: None pins only where there is one")
    return available if pin_memory is None else pin_memory


def one_of(name: str, value: Any, kinds: Any) -> Any:
    """`value`, which is one of the literals of `kinds`."""
    if value not in get_args(kinds):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(kinds)))}")
    return value
