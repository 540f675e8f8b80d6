"""Collate samples into a batch, and work on batches of any structure: pin one, map its tensors, or empty it.

Without a `collate_fn`, samples are stacked as by torch's `default_collate`: numbers and arrays become tensors, dicts stay dicts,
strings become lists. The only difference is that a batch of tuples is a tuple here and a list there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]


def collated(samples: list[Any]) -> Any:
    """Collate `samples` as torch does."""
    data = default_collate(samples)
    return tuple(data) if isinstance(data, list) and isinstance(samples[0], tuple | list) else data


def collated_images(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Collate images in their memory order: decoders interleave colours, and reordering costs five copies."""
    y = torch.tensor([label for _, label in samples])
    pixels = [image.permute(1, 2, 0) for image, _ in samples if image.dim() == 3]
    if len(pixels) == len(samples) and all(image.is_contiguous() for image in pixels):
        return torch.stack(pixels).permute(0, 3, 1, 2), y
    return torch.stack([image for image, _ in samples]), y


def pinned(data: Any) -> Any:
    """Copy a batch to pinned memory. Your own objects are pinned by their method `pin_memory`, as in torch's DataLoader."""
    if isinstance(data, Tensor):
        return data.pin_memory()
    if isinstance(data, str | bytes | type):
        return data
    if (parts := _parts(data)) is not None:
        return _rebuilt(data, {key: pinned(value) for key, value in parts.items()})
    return data.pin_memory() if callable(getattr(data, "pin_memory", None)) else data


def map_tensors(change: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply `change` to every tensor in the containers of a batch."""
    if isinstance(data, Tensor):
        return change(data)
    parts = _parts(data)
    return data if parts is None else _rebuilt(data, {key: map_tensors(change, value) for key, value in parts.items()})


class UnknownBatchError(TypeError):
    """A batch of a type that cannot be emptied."""


def without_rows(one: Any, two: Any) -> Any:
    """Make a batch without samples, from a batch of one sample and one with the same sample twice.

    A tensor is cut to length 0 in the dimension in which the two differ, and so is a list whose length differs. What is the same
    in both does not count samples and stays.
    """
    if isinstance(one, Tensor):
        grows = next((d for d in range(one.dim()) if one.shape[d] != two.shape[d]), None)
        return one if grows is None else one.narrow(grows, 0, 0)
    if isinstance(one, str | bytes | int | float | bool | None):
        return one
    if isinstance(one, list | tuple) and len(one) != len(two):
        return type(one)()
    parts, others = _parts(one), _parts(two)
    if parts is not None and others is not None:
        return _rebuilt(one, {key: without_rows(value, others[key]) for key, value in parts.items()})
    try:
        return one[:0]  # an array of NumPy, for example
    except Exception as error:
        raise UnknownBatchError(f"a batch without samples cannot be made of {type(one).__name__}") from error


def _parts(data: Any) -> dict[Any, Any] | None:
    """The contents of a container, or None if it is not one."""
    if isinstance(data, MutableMapping):
        return dict(data)
    if isinstance(data, list | tuple):
        return dict(enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
    return None


def _rebuilt(data: Any, parts: dict[Any, Any]) -> Any:
    """A container like `data` with other contents."""
    if type(data) is dict:
        return parts
    if isinstance(data, MutableMapping):
        changed = copy.copy(data)
        changed.update(parts)
        return changed
    if isinstance(data, list | tuple):
        return type(data)(*parts.values()) if hasattr(data, "_fields") else type(data)(parts.values())
    return dataclasses.replace(data, **parts)
