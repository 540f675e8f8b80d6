"""What a network takes: a batch of images, checked before the first convolution would complain about its weight."""

from __future__ import annotations

from torch import Tensor


def check_images(x: Tensor, channels: int) -> None:
    """Raise unless `x` is (batch, channels, height, width)."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"images are (batch, {channels}, height, width); got {tuple(x.shape)}")
