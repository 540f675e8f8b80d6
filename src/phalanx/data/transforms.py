"""From an encoded image to a square of pixels, and from a batch of pixels to what a model takes.

Two kinds of frozen values, both called with the draws of their samples, so that the result for a sample depends on nothing but
the sample, the seed and the epoch:

    decode(data, draws of one row) -> uint8 C x H x W          RandomResizedCrop, CentreCrop
    transform(batch, draws of N rows) -> N x C x H x W         PadCrop, Flip, Normalise, Chain

Pixels stay uint8 until `Normalise`: a quarter of the memory to move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import recycled
from .draws import Draws
from .image import MAX_PIXELS, SHRINKS, decode_image, read_header

Transform = Callable[[Tensor, Draws], Tensor]

# Streams of random numbers. A new use takes a new number; a number that is changed changes every run that was ever recorded.
CROP, PAD_CROP, FLIP = range(3)

ATTEMPTS = 10  # to fit a box of the drawn area and aspect; then the centre is taken
CACHED = 1 << 18  # numbers of one piece of `Normalise`: 1 MiB as float32, what an L2 cache holds


# ---- decode: one encoded image -----------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    def shrunk(self, shrink: int) -> Box:
        """The same place in an image decoded at 1/shrink: its corner on the nearest pixel of the coarser grid, never outside."""
        return Box(
            (self.top + shrink // 2) // shrink, (self.left + shrink // 2) // shrink, self.height // shrink, self.width // shrink
        )


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Decode an image, crop a random box, resize it to size x size and mirror it in half of the epochs.

    The rule of GoogLeNet (Szegedy 2014): up to 10 attempts, then the largest box in the centre with an allowed aspect.

    Args:
        size: Pixels of each side of the result.
        area: The least and largest area of the box, as fractions of the image.
        aspect: The least and largest width / height of the box.
        flip: Mirror with probability 1/2.
        max_pixels: Refuse larger images.

    Raises:
        ValueError: If an option makes no sense.
        BadSample: When called on an image that cannot be decoded.

    Example:
        >>> crop = phalanx.data.RandomResizedCrop(224)
        >>> crop.area, crop.flip
        ((0.08, 1.0), True)
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: at least 1 pixel")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area={self.area}: two fractions of the image, the smaller first")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"aspect={self.aspect}: two ratios of width to height, the smaller first")

    def __call__(self, data: bytes, draws: Draws) -> Tensor:
        header = read_header(data, max_pixels=self.max_pixels)
        numbers = draws.uniform(CROP, 4 * ATTEMPTS + 1)[0].tolist()
        box = choose_box(header.height, header.width, numbers, self.area, self.aspect)
        shrink = next(s for s in SHRINKS if s == 1 or min(box.height, box.width) // s >= self.size)
        rows = box.top + box.height + shrink // 2  # its corner moves by so much at most
        pixels = decode_image(data, shrink=shrink, rows=rows, header=header)
        top, left, height, width = box.shrunk(shrink)
        square = resize(pixels[:, top : top + height, left : left + width], self.size, self.size)
        return square.flip(-1) if self.flip and numbers[-1] < 0.5 else square


@dataclass(frozen=True, slots=True)
class CentreCrop:
    """Decode an image, resize its shorter side to `resize`, and cut size x size pixels from the centre. ImageNet is evaluated so.

    Args:
        size: Pixels of each side of the result.
        resize: Pixels of the shorter side before the crop.
        max_pixels: Refuse larger images.

    Raises:
        ValueError: If `size` is larger than `resize`.
        BadSample: When called on an image that cannot be decoded.

    Example:
        >>> phalanx.data.CentreCrop(224, resize=256).size
        224
    """

    size: int
    resize: int
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"size={self.size}, resize={self.resize}: a square of 1 pixel at least, from an image not smaller")

    def __call__(self, data: bytes, draws: Draws) -> Tensor:
        header = read_header(data, max_pixels=self.max_pixels)
        shorter = min(header.height, header.width)
        # rounded down, as torchvision does
        height, width = (self.resize * side // shorter for side in (header.height, header.width))
        shrink = next(s for s in SHRINKS if s == 1 or shorter // s >= self.resize)
        pixels = resize(decode_image(data, shrink=shrink, header=header), height, width)
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        # a copy of its own: the view would keep, and a worker process would send, the whole image
        return pixels[:, top : top + self.size, left : left + self.size].clone()


def choose_box(height: int, width: int, numbers: Sequence[float], area: tuple[float, float], aspect: tuple[float, float]) -> Box:
    """The crop of an image for `numbers` in [0, 1), four for each attempt: area, aspect, top, left."""
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for attempt in range(ATTEMPTS):
        for_area, for_aspect, for_top, for_left = numbers[4 * attempt : 4 * attempt + 4]
        pixels = height * width * (area[0] + (area[1] - area[0]) * for_area)
        ratio = math.exp(low + (high - low) * for_aspect)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(for_top * (height - h + 1)), int(for_left * (width - w + 1)), h, w)
    h, w = height, width
    if width < aspect[0] * height:
        h = max(1, min(height, round(width / aspect[0])))
    elif width > aspect[1] * height:
        w = max(1, min(width, round(height * aspect[1])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """uint8 C x H x W to height x width, bilinear, each pixel of the result a weighted mean of all that it covers (as Pillow)."""
    # With its batch axis in front *before* the axes are permuted torch sees channels-last memory, and is half again as fast.
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]


# ---- transform: a whole batch ------------------------------------------------------------------------------------------------


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
            raise ValueError(f"pad={self.pad}: from 0")

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
        # A line of the result is `width` neighbours in memory, wherever it begins. So let a window of that width begin at every
        # address; then one gather takes all lines of the batch, each in one piece.
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
            raise ValueError(f"p={self.p}: a probability")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        mirrored = torch.from_numpy(draws.uniform(FLIP) < self.p)
        # each sample's choice among both: copies of whole images, where a mask would be asked for every pixel
        return torch.cat([x, x.flip(-1)]).index_select(0, torch.arange(len(x)) + len(x) * mirrored)


@dataclass(frozen=True, slots=True)
class Normalise:
    """Turn a batch of uint8 images into (x / 255 - mean) / std, per channel.

    Args:
        mean: One number per channel, in units of [0, 1].
        std: One number per channel, more than 0.
        dtype: The dtype of the result.
        channels_last: Make a result in channels-last memory order.

    Raises:
        ValueError: If an option makes no sense, or the batch is not uint8 N x C x H x W.

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
            raise ValueError(f"dtype={self.dtype}: the result is fractions")

    def __call__(self, x: Tensor, draws: Draws | None = None) -> Tensor:
        if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] != len(self.mean):
            raise ValueError(f"Normalise wants uint8 N x {len(self.mean)} x H x W, not {x.dtype} {tuple(x.shape)}")
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        n, channels, height, width = x.shape
        if self.channels_last:
            out = recycled.empty((n, height, width, channels), self.dtype).permute(0, 3, 1, 2)
        else:
            out = recycled.empty((n, channels, height, width), self.dtype)
        scale, shift = self._coefficients(width)
        # Piece by piece, small enough to stay in the cache between the operations: the memory sees one pass.
        step = max(1, CACHED // max(1, channels * height * width))
        for first in range(0, n, step):
            pixels, piece = x[first : first + step], out[first : first + step]
            exact = piece if self.dtype == torch.float32 else torch.empty_like(piece, dtype=torch.float32)
            if pixels.is_contiguous(memory_format=layout):
                exact.copy_(pixels)
            else:  # from one memory order to the other numpy takes 2/3 of torch's time
                np.copyto(exact.numpy(), pixels.numpy())
            self._lines(exact).mul_(scale).add_(shift)
            if exact is not piece:
                piece.copy_(exact)
        return out

    def _coefficients(self, width: int) -> tuple[Tensor, Tensor]:
        std = torch.tensor(self.std, dtype=torch.float64)
        scale = (1 / (255 * std)).float()
        shift = (-torch.tensor(self.mean, dtype=torch.float64) / std).float()
        if self.channels_last:  # one for each number of a line of pixels: an inner loop of width x C, not of C
            return scale.repeat(width), shift.repeat(width)
        return scale[:, None], shift[:, None]

    def _lines(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2) if self.channels_last else x.flatten(2)


@dataclass(frozen=True, slots=True, init=False)
class Chain:
    """Apply transforms one after the other. Two of the same kind draw the same numbers.

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
