"""Decode one image safely: any bytes give an image or a `BadSample` with the reason.

JPEGs go to libjpeg-turbo (simplejpeg), which decodes at reduced scale and releases the interpreter lock. JPEGs that it finds odd,
and all other formats, go to Pillow, which sets the standard: we read what `Image.open(...).convert("RGB")` reads and reject what
it rejects. Sizes are read from the header and checked before any pixel gets memory.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.schedule.printable import one_line

MAX_PIXELS = 1 << 26  # 67 million, more than a camera's JPEG in a data set; decoding takes at most 7 bytes each
PIXELS_PER_BYTE = 1024  # of a JPEG, at most: a block of 64 takes at least one bit, so 512 are possible
MAX_SCANS = 100  # of a progressive JPEG; encoders write about 10
MAX_PASSES = 10 * MAX_PIXELS  # scans times pixels: each one costs a pass over all of them
MAX_READS = 4000  # by Pillow, of a header; a few hundred are usual
MAX_READS_OF_PIXELS = 1_000_000  # run-length coded BMPs take one for every run
STRIP = 64  # rows that Pillow converts at a time; a multiple of all SHRINKS
LIGHT = 7  # bytes per pixel while decoding: 4 in Pillow, 3 as the result
PROGRESSIVE = 10  # the same for a progressive JPEG: 6 for coefficients
HELD = {"WEBP": 20, "JPEG": PROGRESSIVE}  # the same for these formats: libwebp holds two frames, Pillow two copies of them
MARGIN = 16  # rows decoded below the last one wanted, whose colours are interpolated with the next
END = b"\xff\xd9"  # of a JPEG that was not cut off
SHRINKS = (8, 4, 2, 1)  # by these libjpeg-turbo decodes faster than in full; 7/8 to 5/8 it also can, but more slowly than 1

# The formats that Pillow may try. Its other readers are disabled: some start programs (EPS), most are less hardened.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")


class BadSample(Exception):  # noqa: N818  # it names the sample, not the accident
    """A sample that cannot be used, such as a damaged image.

    Args:
        name: The file, or the shard and its member. Empty if it is not known yet.
        reason: What is wrong.

    Example:
        >>> str(phalanx.data.BadSample("cats/7.jpg", "the file is empty"))
        'cats/7.jpg: the file is empty'
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both in `args`, so that a worker process can send it
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return one_line(f"{self.name or 'a sample'}: {self.reason}")  # the name comes from an archive, maybe from a stranger

    def named(self, name: str) -> BadSample:
        """The same error with a name, if it has none yet."""
        return self if self.name else BadSample(name, self.reason)


@dataclass(frozen=True, slots=True)
class Header:
    """What an image's header tells before it is decoded.

    `plain_jpeg`: libjpeg-turbo can decode it to RGB. `frame`: where the frame header begins, if the pixels come in one scan,
    from top to bottom; else None.
    """

    height: int
    width: int
    plain_jpeg: bool = False
    frame: int | None = None


def read_header(data: bytes, *, name: str = "", max_pixels: int = MAX_PIXELS) -> Header:
    """Read size and kind from the first bytes. Rejects images of more than `max_pixels` before decoding."""
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
    """Decode to RGB uint8, 3 x H x W in channels-last memory. `shrink` 2, 4 or 8 gives ceil(H / shrink) x ceil(W / shrink).

    Give `rows` if you need only the first rows of the image (counted before shrinking); you get these or more. Give `header` if
    you have read it.

    Grey and palette images become RGB, 16 bits become their upper 8, alpha is dropped, an animation is its first frame. EXIF
    orientation is ignored, as in the published recipes.
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
    """Read a JPEG's header, or return None if Pillow should: not a JPEG, or an odd one."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    # the bytes FF DA begin a scan; entropy-coded data never contain them, thumbnails may, a few times
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
    """Reject a JPEG with fewer bytes than its pixels need: decoders would fill the rest with grey, slowly."""
    if header.height * header.width > PIXELS_PER_BYTE * len(data):
        raise BadSample(name, f"claims {header.width}x{header.height} pixels, but has {len(data)} bytes: cut off, or a bomb")


def _frame_of_one_scan(data: bytes) -> int | None:
    """The offset of a sequential frame whose first scan has all components, so that the decoder reads no other scan."""
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
    """Decode, or return None if libjpeg-turbo warns: Pillow knows which warnings are harmless."""
    # The library uses its smallest scale that is not below the requested size, and rounds sizes up, as we do.
    least = {"min_height": -(-header.height // shrink), "min_width": -(-header.width // shrink)} if shrink > 1 else {}
    try:
        return _simplejpeg().decode_jpeg(data, **least)
    except ValueError:
        return None


def _turbo_top(data: bytes, header: Header, rows: int, shrink: int) -> np.ndarray | None:
    """Decode the first rows of a JPEG by patching its header to say there are no more.

    The library has no call for it. The decoder stops after them and warns about the remaining bytes, so warnings must be allowed
    here. Pillow allows them, too, and a truncated file, which Pillow rejects, does not get here.
    """
    assert header.frame is not None
    height = header.frame + 5  # after marker, length and precision
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
    image = _open(_LimitedReads(data), name)
    header = Header(image.height, image.width)
    _check_size(header, name, max_pixels * LIGHT // HELD.get(image.format, LIGHT))
    if image.format == "JPEG":
        _check_claim(header, data, name)
    return header


def _pillow_pixels(data: bytes, name: str, shrink: int) -> np.ndarray:
    """Convert in strips: a whole image plus its RGB and array would take twice the memory."""
    file = _LimitedReads(data)
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
        image = image.convert("RGBA")  # the same colours, without a Pillow warning per file
    return image if image.mode == "RGB" else image.convert("RGB")


class _LimitedReads(io.BytesIO):
    """A file that limits the number of reads: Pillow reads comments and padding byte by byte."""

    patience = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.patience -= 1
        if self.patience < 0:
            raise OSError("it has too many comments, blocks or bytes of padding")
        return super().read(size)


def _open(file: _LimitedReads, name: str) -> Any:
    """Open with Pillow, which reads only the header."""
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
    # on broken headers, Pillow raises anything: struct.error, IndexError, OverflowError, ...
    except Exception as error:
        raise BadSample(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    return f"cannot be decoded: {str(error)[:300] or type(error).__name__}"
