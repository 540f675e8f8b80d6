"""What travels: the gradient itself, or a 16-bit copy of it.

Scaled by 1/size before the cast, because a 16-bit sum over many ranks overflows. A value that overflows all the same is detected
after the sum and reported with the names of the parameters, never silently: the gradient keeps its inf, as without compression.
"""

from __future__ import annotations

import torch

WIRES = (torch.float16, torch.bfloat16)


def check_wire(dtype: torch.dtype | None) -> None:
    """Raise for what is no wire."""
    if dtype is not None and dtype not in WIRES:
        raise TypeError(f"wire={dtype!r}: torch.float16, torch.bfloat16, or None to send gradients as they are")


def carries(flat: torch.Tensor) -> bool:
    """Whether `flat` travels compressed: only what is wider than 16 bits gains."""
    return flat.is_floating_point() and flat.element_size() > 2


def pack(flat: torch.Tensor, wire: torch.Tensor, scale: float) -> torch.Tensor:
    """Write the scaled copy of `flat` to `wire`, and return it."""
    return torch.mul(flat, scale, out=wire)


def unpack(wire: torch.Tensor, flat: torch.Tensor) -> bool:
    """Write the reduced copy back; whether all of it is finite."""
    flat.copy_(wire)
    return bool(torch.isfinite(wire).all())
