"""Describes the tensors of a replica, so that a message is only mixed with the tensors it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Kinds = tuple[Any, Any, Any]  # of parameters, optimizer state (None if it is not sent) and statistics


def kinds_of(drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> Kinds:
    """Return shapes, dtypes, strides and devices. The last `optional` of the `drifting` tensors are optimizer state."""
    kinds = [_kind(x) for x in drifting]
    split = len(drifting) - optional
    return tuple(kinds[:split]), tuple(kinds[split:]), tuple(_kind(x) for x in averaged)


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride(), x.device


def fit(sent: Kinds, now: Kinds | None) -> bool:
    """Whether what was sent matches the tensors that exist now."""
    return now is not None and (sent[0], sent[2]) == (now[0], now[2]) and sent[1] in (None, now[1])
