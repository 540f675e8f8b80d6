"""Who else uses the memory of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def other_views(x: torch.Tensor) -> int | None:
    """How many other tensors use the memory of `x`; None where this torch cannot tell."""
    count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(x.untyped_storage()._cdata) - _count_of_a_lone_tensor()


@functools.cache
def _count_of_a_lone_tensor() -> int:
    """Versions of torch differ in whether the object that asks counts: 1 in torch 2.6, 2 in torch 2.13."""
    lone = torch.empty(1)
    return torch._C._storage_Use_Count(lone.untyped_storage()._cdata)
