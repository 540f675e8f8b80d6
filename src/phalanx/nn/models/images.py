"""Check a network's input, a batch of images, before the first convolution fails with an obscure error."""

from __future__ import annotations

from torch import Tensor


def check_images(x: Tensor, channels: int) -> None:
    """Raise unless `x` is (batch, channels, height, width)."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"images are (batch, {channels}, height, width); got {tuple(x.shape)}")
