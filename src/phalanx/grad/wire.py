"""Sends the gradient itself, or a 16-bit copy of it.

We scale by 1/size before the cast, because a 16-bit sum over many ranks overflows. An overflow is still detected after the sum
and reported with the names of the parameters. The gradient keeps its inf, as without compression.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

SumOp = Literal["sum", "mean"]  # what becomes of gradients on any wire

BLOCK = 128 << 10  # elements
WIRES = (torch.float16, torch.bfloat16)


def check_wire(dtype: torch.dtype | None) -> None:
    """Raise if `dtype` is not a wire."""
    if dtype is not None and dtype not in WIRES:
        raise TypeError(f"wire={dtype!r}: torch.float16, torch.bfloat16, or None to send gradients as they are")


def carries(flat: torch.Tensor) -> bool:
    """Whether `flat` is sent compressed. That pays only for elements wider than 16 bits."""
    return flat.is_floating_point() and flat.element_size() > 2


def pack(flat: torch.Tensor, wire: torch.Tensor, scale: float) -> torch.Tensor:
    """Write a scaled copy of `flat` to `wire`, and return it. `flat` is scaled too, because the result will replace it."""
    for x, narrow in _blocks(flat, wire):
        narrow.copy_(x.mul_(scale))  # torch.mul(x, scale, out=narrow) takes three times as long
    return wire


def unpack(wire: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Write the reduced copy back. Return whether all of it is finite, as a tensor: on a GPU the host must not wait."""
    extremes: list[torch.Tensor] = []
    for x, narrow in _blocks(flat, wire):
        x.copy_(narrow)
        extremes += torch.aminmax(narrow)  # NaN shows up in both; `isfinite(...).all()` takes sixteen times as long
    return torch.isfinite(torch.stack(extremes)).all() if extremes else torch.ones((), dtype=torch.bool, device=flat.device)


def _blocks(flat: torch.Tensor, wire: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split both into pieces that fit in a core's cache, so that two passes cost as much as one. On a GPU, don't split."""
    if not flat.is_cpu:
        return iter([(flat, wire)] if flat.numel() else [])
    return zip(flat.split(BLOCK), wire.split(BLOCK)) if flat.numel() else iter([])
