"""One encoded image to pixels, safely: whatever the bytes are, an image comes out or `BadSample` says why not.

JPEGs go to libjpeg-turbo (simplejpeg), which decodes at reduced scale and lets other threads run meanwhile. What it finds odd,
and every other format, goes to Pillow, whose judgement image folders are used to: what `Image.open(...).convert("RGB")` reads is
read, what it refuses is refused. Sizes are read from the header and refused before any pixel has memory.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.schedule.printable import one_line

MAX_PIXELS = 1 << 26  # 67 million: beyond every camera's JPEG of a data set; at most 7 bytes each are held while decoding
PIXELS_PER_BYTE = 1024  # of a JPEG, at most: a block of 64 takes one bit at the least, so 512 are possible
MAX_SCANS = 100  # of a progressive JPEG; encoders write about 10
MAX_PASSES = 10 * MAX_PIXELS  # scans times pixels: each one costs a pass over all of them
MAX_READS = 4000  # that Pillow makes of a header; usual are some hundred
MAX_READS_OF_PIXELS = 1_000_000  # run-length coded BMPs take one for every run
STRIP = 64  # rows that Pillow converts at a time; a multiple of all SHRINKS
LIGHT = 7  # bytes that a pixel takes while it is decoded: 4 in Pillow, 3 as the result
PROGRESSIVE = 10  # that one of a progressive JPEG takes: 6 for coefficients
HELD = {"WEBP": 20, "JPEG": PROGRESSIVE}  # that one of these takes: libwebp holds two frames, Pillow two copies of them
MARGIN = 16  # rows decoded below the last one wanted, whose colours are interpolated with the next
END = b"\xff\xd9"  # of a JPEG that was not cut off
SHRINKS = (8, 4, 2, 1)  # by these libjpeg-turbo decodes faster than in full; 7/8 to 5/8 it also can, but more slowly than 1

# What Pillow may look for. Its other readers are left out: some start programs (EPS), few see images from strangers as often.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")


class BadSample(Exception):  # noqa: N818  # it names the sample, not the accident
    """A sample that cannot be used, such as a damaged image.

    Args:
        name: The file, or the shard and its member. Empty while it is not known.
        reason: What is wrong.

    Example:
        >>> str(phalanx.data.BadSample("cats/7.jpg", "the file is empty"))
        'cats/7.jpg: the file is empty'
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both in `args`: a worker process can send it home
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return one_line(f"{self.name or 'a sample'}: {self.reason}")  # the name comes from an archive, maybe from a stranger

    def named(self, name: str) -> BadSample:
        """The same error with a name, if it has none yet."""
        return self if self.name else BadSample(name, self.reason)


@dataclass(frozen=True, slots=True)
class Header:
    """What an image says of itself before it is decoded.

    `plain_jpeg`: libjpeg-turbo makes RGB of it. `frame`: where the frame header begins, of a JPEG whose pixels come in one scan,
    from top to bottom; else None.
    """

    height: int
    width: int
    plain_jpeg: bool = False
    frame: int | None = None


def read_header(data: bytes, *, name: str = "", max_pixels: int = MAX_PIXELS) -> Header:
    """Size and kind, from the first bytes; an image of more than `max_pixels` is refused here, undecoded."""
    if not data:
        raise BadSample(name, "the file is empty")
    header = _jpeg_header(data, name, max_pixels) or _pillow_header(data, name, max_pixels)
    _check_size(header, name, max_pixels)
    return header


def _check_size(header: Header, name: str, max_pixels: int) -> None:
    if header.height * header.width > max_pixels:
        raise BadSample(name, f"{header.width}x{header.height} pixels are more than the limit of {max_pixels:,}")


def decode_image(
    data: bytes,
    *,
    name: str = "",
    shrink: int = 1,
    rows: int | None = None,
    max_pixels: int = MAX_PIXELS,
    header: Header | None = None,
) -> Tensor:
    """RGB as uint8, 3 x H x W in channels-last memory; with `shrink` 2, 4 or 8 only ceil(H / shrink) x ceil(W / shrink).

    Give `rows` if you need only the first rows of the image (counted before shrinking); you get these or more. Give `header` if
    you have read it.

    Grey and palette images become RGB, 16 bits become their upper 8, alpha is dropped, an animation is its first frame. The
    orientation of EXIF is ignored, as the published recipes do.
    """
    if shrink not in SHRINKS:
        raise ValueError(f"shrink={shrink}: images are decoded at 1/1, 1/2, 1/4 or 1/8")
    header = header or read_header(data, name=name, max_pixels=max_pixels)
    pixels = None
    if header.plain_jpeg:
        if rows is not None and header.frame is not None and rows + MARGIN < header.height and data.endswith(END):
            pixels = _turbo_top(data, header, rows + MARGIN, shrink)
        else:
            pixels = _turbo_pixels(data, header, shrink)
    if pixels is None:
        pixels = _pillow_pixels(data, name, shrink)
    return torch.from_numpy(pixels).permute(2, 0, 1)


# ---- libjpeg-turbo -----------------------------------------------------------------------------------------------------------


def _jpeg_header(data: bytes, name: str, max_pixels: int) -> Header | None:
    """None where Pillow shall look: not a JPEG, or an odd one."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    # the bytes FF DA begin a scan; entropy-coded data never hold them, thumbnails may, a few times
    frame = _frame_of_one_scan(data)
    scans = data.count(b"\xff\xda") if frame is None else 1
    if scans > MAX_SCANS:
        raise BadSample(name, f"a JPEG of {scans} scans, more than the limit of {MAX_SCANS}")
    try:
        height, width, colours, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    header = Header(height, width, colours in ("YCbCr", "Gray", "RGB"), frame)
    _check_size(header, name, max_pixels if frame is not None else max_pixels * LIGHT // PROGRESSIVE)
    _check_claim(header, data, name)
    if height * width * scans > MAX_PASSES:
        raise BadSample(
            name, f"a JPEG of {width}x{height} pixels in {scans} scans takes too long: more than {MAX_PASSES:,} in all"
        )
    return header


def _check_claim(header: Header, data: bytes, name: str) -> None:
    """Refuse a JPEG of fewer bytes than its pixels need: decoders fill the rest with grey, and take their time for it."""
    if header.height * header.width > PIXELS_PER_BYTE * len(data):
        raise BadSample(name, f"claims {header.width}x{header.height} pixels, but has {len(data)} bytes: cut off, or a bomb")


def _frame_of_one_scan(data: bytes) -> int | None:
    """Where a sequential frame begins whose first scan has all components: the decoder then reads no other scan."""
    at, frame = 2, None
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in (0xC0, 0xC1):
            frame = at
        elif marker == 0xDA:
            return frame if frame is not None and data[at + 4] == data[frame + 9] else None
        at += 2 + length
    return None


def _turbo_pixels(data: bytes, header: Header, shrink: int) -> np.ndarray | None:
    """None where libjpeg-turbo has as little as a warning: Pillow knows which ones are harmless."""
    # The library takes the smallest of its scales that is not below the size asked for; and it rounds sizes up, as here.
    least = {"min_height": -(-header.height // shrink), "min_width": -(-header.width // shrink)} if shrink > 1 else {}
    try:
        return _simplejpeg().decode_jpeg(data, **least)
    except ValueError:
        return None


def _turbo_top(data: bytes, header: Header, rows: int, shrink: int) -> np.ndarray | None:
    """The first rows of a JPEG, by a header that says there are no more.

    The library has no call for it. The decoder stops after them and warns of the bytes that are left, so here warnings must pass;
    that is what Pillow does with them too, and a file that was cut off, which Pillow refuses, does not come this way.
    """
    assert header.frame is not None
    height = header.frame + 5  # marker, length and precision stand before it
    shorter = data[:height] + rows.to_bytes(2, "big") + data[height + 2 :]
    least = {"min_height": -(-rows // shrink), "min_width": -(-header.width // shrink)} if shrink > 1 else {}
    try:
        return _simplejpeg().decode_jpeg(shorter, strict=False, **least)
    except ValueError:
        return None


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise ImportError(f"{error}: to decode JPEGs, pip install 'phalanx[images]'") from error
    return simplejpeg


# ---- Pillow ------------------------------------------------------------------------------------------------------------------


def _pillow_header(data: bytes, name: str, max_pixels: int) -> Header:
    image = _open(_Impatient(data), name)
    header = Header(image.height, image.width)
    _check_size(header, name, max_pixels * LIGHT // HELD.get(image.format, LIGHT))
    if image.format == "JPEG":
        _check_claim(header, data, name)
    return header


def _pillow_pixels(data: bytes, name: str, shrink: int) -> np.ndarray:
    """In strips: an image as a whole, its RGB and an array of it would take twice the memory."""
    file = _Impatient(data)
    image = _open(file, name)
    try:
        file.patience = MAX_READS_OF_PIXELS
        image.load()
        pixels = np.empty((-(-image.height // shrink), -(-image.width // shrink), 3), np.uint8)
        for top in range(0, image.height, STRIP):
            bottom = min(top + STRIP, image.height)
            strip = _rgb(image.crop((0, top, image.width, bottom)))
            pixels[top // shrink : -(-bottom // shrink)] = np.asarray(strip.reduce(shrink) if shrink > 1 else strip)
    except Exception as error:
        raise BadSample(name, _reason(error)) from error
    return pixels


def _rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode in ("I", "I;16", "I;16B", "I;16L"):  # 16-bit grey; convert("RGB") would cut all above 255 to white
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without Pillow's warning for every such file
    return image if image.mode == "RGB" else image.convert("RGB")


class _Impatient(io.BytesIO):
    """A file that is not read in too many small pieces: Pillow's readers take comments and padding byte by byte."""

    patience = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.patience -= 1
        if self.patience < 0:
            raise OSError("it has too many comments, blocks or bytes of padding")
        return super().read(size)


def _open(file: _Impatient, name: str) -> Any:
    """Pillow's view of the header; the pixels wait."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"{error}: to decode images, pip install 'phalanx[images]'") from error
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadSample(
            name, f"not an image of a known kind ({', '.join(FORMATS)}); begins with {file.getvalue()[:8]!r}"
        ) from error
    # Pillow's readers meet broken headers with whatever their arithmetic raises: struct.error, IndexError, OverflowError, ...
    except Exception as error:
        raise BadSample(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    return f"cannot be decoded: {str(error)[:300] or type(error).__name__}"
