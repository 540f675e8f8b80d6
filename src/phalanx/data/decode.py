"""From the bytes of an encoded image to a square of pixels: uint8 C x H x W.

A decoder is a frozen value, called with the bytes and the draws of one row. So the result for a sample depends only on the
sample, the seed and the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .draws import CROP, Draws
from .image import MAX_PIXELS, SHRINKS, decode_image, read_header

ATTEMPTS = 10  # to fit a box of the drawn area and aspect; after that, use the centre


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    def shrunk(self, shrink: int) -> Box:
        """The same box in an image decoded at 1/shrink: its corner moves to the nearest pixel, never outside."""
        return Box(
            (self.top + shrink // 2) // shrink, (self.left + shrink // 2) // shrink, self.height // shrink, self.width // shrink
        )


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Decode an image, crop a random box, resize it to size x size and mirror it with probability 1/2.

    The rule of GoogLeNet (Szegedy 2014): up to 10 attempts, then the largest box in the centre with an allowed aspect.

    Args:
        size: Pixels of each side of the result.
        area: The least and largest area of the box, as fractions of the image.
        aspect: The least and largest width / height of the box.
        flip: Mirror with probability 1/2.
        max_pixels: Reject larger images.

    Raises:
        ValueError: If an option is invalid.
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
        rows = box.top + box.height + shrink // 2  # the corner moves by at most shrink // 2
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
        # a copy: a view would keep the whole image alive, and a worker process would send it
        return pixels[:, top : top + self.size, left : left + self.size].clone()


def choose_box(height: int, width: int, numbers: Sequence[float], area: tuple[float, float], aspect: tuple[float, float]) -> Box:
    """Choose the crop of an image from `numbers` in [0, 1), four per attempt: area, aspect, top, left."""
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
    """Resize uint8 C x H x W bilinearly; each pixel is a weighted mean of all that it covers, as in Pillow."""
    # Adding the batch axis *before* permuting lets torch see channels-last memory, which is 1.5 times as fast.
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]
