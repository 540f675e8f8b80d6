"""From disk to a batch: sources, exact epochs, the distributed shuffle, transforms and the loader."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assemble import SampleError
    from .batch import BatchPlan, Stage
    from .decode import CentreCrop, RandomResizedCrop
    from .draws import Draws
    from .image import BadSample
    from .loader import Loader
    from .order import Order, epoch_order
    from .position import Position
    from .scatter import Shard, scatter_dataset, scatter_index
    from .shuffle import AsyncShuffle
    from .source import Arrays, Encoded, SourceError, open  # noqa: A004  the room, not a builtin: phalanx.data.open
    from .step import Step
    from .stream import StreamShare, stream_share
    from .transforms import Chain, Flip, Normalise, PadCrop

# loaded on first use, so that a program that trains from memory does not import an image library
_HOME = {
    "Arrays": "source",
    "AsyncShuffle": "shuffle",
    "BadSample": "image",
    "BatchPlan": "batch",
    "CentreCrop": "decode",
    "Chain": "transforms",
    "Draws": "draws",
    "Encoded": "source",
    "Flip": "transforms",
    "Loader": "loader",
    "Normalise": "transforms",
    "Order": "order",
    "PadCrop": "transforms",
    "Position": "position",
    "RandomResizedCrop": "decode",
    "SampleError": "assemble",
    "Shard": "scatter",
    "SourceError": "source",
    "Stage": "batch",
    "Step": "step",
    "StreamShare": "stream",
    "epoch_order": "order",
    "open": "source",
    "scatter_dataset": "scatter",
    "scatter_index": "scatter",
    "stream_share": "stream",
}

__all__ = [
    "Arrays",
    "AsyncShuffle",
    "BadSample",
    "BatchPlan",
    "CentreCrop",
    "Chain",
    "Draws",
    "Encoded",
    "Flip",
    "Loader",
    "Normalise",
    "Order",
    "PadCrop",
    "Position",
    "RandomResizedCrop",
    "SampleError",
    "Shard",
    "SourceError",
    "Stage",
    "Step",
    "StreamShare",
    "epoch_order",
    "open",
    "scatter_dataset",
    "scatter_index",
    "stream_share",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
