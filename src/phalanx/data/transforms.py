"""Turn a batch of pixels into the input of a model.

A transform is a frozen value, called with a batch N x C x H x W and the draws of its N samples. So the result for a sample
depends only on the sample, the seed and the epoch. Pixels stay uint8 until `Normalise`, which moves a quarter of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import recycled
from .draws import FLIP, PAD_CROP, Draws

Transform = Callable[[Tensor, Draws], Tensor]

CACHED = 1 << 18  # numbers that `Normalise` processes at a time: 1 MiB as float32, which fits an L2 cache


@dataclass(frozen=True, slots=True)
class PadCrop:
    """Pad a batch of images with zeros and crop each at a random place: the usual augmentation for CIFAR.

    Args:
        pad: Pixels of zeros on each side.

    Raises:
        ValueError: If `pad` is negative.

    Example:
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> phalanx.data.PadCrop(4)(images, phalanx.data.Draws(0, 0, [0, 1])).shape
        torch.Size([2, 3, 32, 32])
    """

    pad: int = 4

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ValueError(f"pad={self.pad}: must be 0 or more")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        n, channels, height, width = x.shape
        if not x.numel():
            return x
        places = 2 * self.pad + 1
        top, left = torch.from_numpy(draws.uniform(PAD_CROP, 2) * places).long().unbind(1)
        padded = F.pad(x.contiguous(), [self.pad] * 4).flatten()
        line = width + 2 * self.pad
        plane = line * (height + 2 * self.pad)
        planes = torch.arange(n * channels).view(n, channels, 1) * plane
        lines = torch.arange(height) * line
        starts = planes + lines + (top * line + left).view(n, 1, 1)
        # A line of the result is `width` adjacent elements, starting anywhere. So view the memory as windows of that width, one
        # per address; then one gather copies all lines of the batch, each in one piece.
        windows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return windows.index_select(0, starts.flatten()).view(x.shape)


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror each image of a batch left to right with probability `p`.

    Args:
        p: The probability.

    Raises:
        ValueError: If `p` is not a probability.

    Example:
        >>> image = torch.tensor([[[[1, 2]]]], dtype=torch.uint8)
        >>> phalanx.data.Flip(p=1.0)(image, phalanx.data.Draws(0, 0, [0])).tolist()
        [[[[2, 1]]]]
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p}: must be a probability, from 0 to 1")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        mirrored = torch.from_numpy(draws.uniform(FLIP) < self.p)
        # select whole images from both: a mask would be evaluated for every pixel
        return torch.cat([x, x.flip(-1)]).index_select(0, torch.arange(len(x)) + len(x) * mirrored)


@dataclass(frozen=True, slots=True)
class Normalise:
    """Turn a batch of uint8 images into (x / 255 - mean) / std, per channel.

    Args:
        mean: One number per channel, in units of [0, 1].
        std: One number per channel, more than 0.
        dtype: The dtype of the result.
        channels_last: Return the result in channels-last memory order.

    Raises:
        ValueError: If an option is invalid, or the batch is not uint8 N x C x H x W.

    Example:
        >>> images = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
        >>> phalanx.data.Normalise((0.5,), (0.5,))(images).unique().tolist()
        [1.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(s > 0 for s in self.std):
            raise ValueError(f"mean={self.mean}, std={self.std}: one of each per channel, std above 0")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype}: the result has fractions, so it needs a floating dtype")

    def __call__(self, x: Tensor, draws: Draws | None = None) -> Tensor:
        if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] != len(self.mean):
            raise ValueError(f"Normalise takes uint8 N x {len(self.mean)} x H x W, not {x.dtype} {tuple(x.shape)}")
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        n, channels, height, width = x.shape
        if self.channels_last:
            out = recycled.empty((n, height, width, channels), self.dtype).permute(0, 3, 1, 2)
        else:
            out = recycled.empty((n, channels, height, width), self.dtype)
        scale, shift = self._coefficients(width)
        # In pieces small enough to stay in the cache between operations, so that memory is read and written once.
        step = max(1, CACHED // max(1, channels * height * width))
        for first in range(0, n, step):
            pixels, piece = x[first : first + step], out[first : first + step]
            exact = piece if self.dtype == torch.float32 else torch.empty_like(piece, dtype=torch.float32)
            if pixels.is_contiguous(memory_format=layout):
                exact.copy_(pixels)
            else:  # numpy changes the memory order in 2/3 of torch's time
                np.copyto(exact.numpy(), pixels.numpy())
            self._lines(exact).mul_(scale).add_(shift)
            if exact is not piece:
                piece.copy_(exact)
        return out

    def _coefficients(self, width: int) -> tuple[Tensor, Tensor]:
        std = torch.tensor(self.std, dtype=torch.float64)
        scale = (1 / (255 * std)).float()
        shift = (-torch.tensor(self.mean, dtype=torch.float64) / std).float()
        if self.channels_last:  # one per number of a line of pixels, for an inner loop of width x C, not of C
            return scale.repeat(width), shift.repeat(width)
        return scale[:, None], shift[:, None]

    def _lines(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2) if self.channels_last else x.flatten(2)


@dataclass(frozen=True, slots=True, init=False)
class Chain:
    """Apply transforms in sequence. Two of the same kind draw the same numbers.

    Args:
        *transforms: Each is called with a batch and its draws.

    Example:
        >>> transform = phalanx.data.Chain(phalanx.data.PadCrop(4), phalanx.data.Flip(), phalanx.data.Normalise((0.5,), (0.5,)))
        >>> transform(torch.zeros(8, 1, 28, 28, dtype=torch.uint8), phalanx.data.Draws(0, 0, range(8))).dtype
        torch.float32
    """

    transforms: tuple[Transform, ...]

    def __init__(self, *transforms: Transform) -> None:
        object.__setattr__(self, "transforms", transforms)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        for transform in self.transforms:
            x = transform(x, draws)
        return x
